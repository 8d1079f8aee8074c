"""What runs and hosts may be called."""

from __future__ import annotations

import re
import socket

from holdfast.core.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a run",
            hint="use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )


def host_name() -> str:
    """This machine's name as far as it can stand in a worker's."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.strip("._-")[:64] or "host"
