"""Which names every storage takes: those that mean the same on a disk, in an object store and in HDFS.

Names come from this library, but what they are joined to comes from users: one `..` or one leading `/` would write
outside the directory that was given. A part never starts with a dot, so an implementation may keep unfinished files
under such names.
"""

from __future__ import annotations

import re

from holdfast.core.errors import ConfigError

NAME_CHARACTERS_MAX = 900  # object stores take 1024 bytes, the user's prefix included
PART_CHARACTERS_MAX = 180  # file systems take 255, the mark of an unfinished file included
PARTS_MAX = 8

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")


def is_name(name: str) -> bool:
    parts = name.split("/")
    return (
        len(name) <= NAME_CHARACTERS_MAX
        and len(parts) <= PARTS_MAX
        and all(len(part) <= PART_CHARACTERS_MAX and _PART.fullmatch(part) for part in parts)
    )


def check_name(name: str) -> None:
    if not is_name(name):
        raise ConfigError(
            f"{name!r} is not a name in a storage",
            hint="up to 8 parts joined by '/', each of letters, digits and _.=+- and not starting with a dot",
        )


def check_prefix(prefix: str) -> None:
    """The beginning of a name: empty, whole parts, or parts and the beginning of one."""
    if prefix:
        check_name(prefix.removesuffix("/"))
