"""Times that people write, and how we write them: 500ms, 30s, 5min, 2h, 7d. The one parser of them. Pure."""

from __future__ import annotations

import re

from holdfast.core.errors import ConfigError

HINT = "give a time: 500ms, 30s, 5min, 2h, 7d"
_UNITS = {
    "ms": 0.001,
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "w": 604800.0,
}
_FORM = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)")


def parse_duration(what: str, text: str, hint: str = HINT) -> float:
    """Seconds; a plain number is seconds. ConfigError that names `what` if it is no time."""
    match = _FORM.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{what} is {text[:40]!r}, which is not a time", hint=hint)
    return float(match[1]) * _UNITS[match[2]]


def spell_duration(seconds: float) -> str:
    """As short as `parse_duration` reads it back: 0.5s, 25s, 2min, 1h, 7d."""
    for unit in ("d", "h", "min"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds!r}s"
