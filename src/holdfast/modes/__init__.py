"""Ways to train, each a package behind port.py. Which of them a run is in, nothing outside of here asks."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.modes.port import Mode

ON_SERVERS = "mode=holdfast.Async(staleness=4)"  # for a hint: a mode that trains on parameter servers


def mode_or_default(mode: Any) -> Mode:
    """What join was given for a mode; ConfigError if it is none."""
    if mode is None:
        from holdfast.modes.exact import Exact

        return Exact()
    if not isinstance(mode, Mode):
        raise ConfigError(
            f"mode is {mode!r:.40}", hint="mode=holdfast.Elastic(), say; without a mode a run is holdfast.Exact()"
        )
    return mode
