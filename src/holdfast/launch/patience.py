"""How long a worker may stand still before it counts as hung: `--stuck-after` and `--hang-after`; or as late:
`--late-after`."""

from __future__ import annotations

import re

from holdfast.core.errors import ConfigError
from holdfast.detection.progress import Limits

PATIENCE_S_MIN, PATIENCE_S_MAX = 0.5, 7 * 86400.0
LATE_S_MIN = 0.1
LATE_AFTER_S = 0.5
NEVER = "none"
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(|s|sec|m|min|h)")


def parse_patience(option: str, text: str, least_s: float = PATIENCE_S_MIN) -> float:
    """Seconds; 0 for never."""
    if text.strip() == NEVER:
        return 0.0
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} is {text[:40]!r}", hint="give a time (30s, 2min, 1h), or none")
    return _check(option, float(match[1]) * _UNITS[match[2]], least_s)


def check_patience(stuck_after_s: float, hang_after_s: float) -> None:
    for option, seconds in (("--stuck-after", stuck_after_s), ("--hang-after", hang_after_s)):
        if seconds:
            _check(option, seconds)


def check_late(seconds: float) -> None:
    if seconds:
        _check("--late-after", seconds, LATE_S_MIN)


def _check(option: str, seconds: float, least_s: float = PATIENCE_S_MIN) -> float:
    if not least_s <= seconds <= PATIENCE_S_MAX:
        raise ConfigError(
            f"{option} is {seconds:g} s, but must be from {least_s:g} s to {PATIENCE_S_MAX / 86400:g} days",
            hint="none switches it off",
        )
    return seconds


def late_flags(late_after_s: float) -> list[str]:
    """The option of `holdfast run` that gives this setting."""
    if late_after_s == LATE_AFTER_S:
        return []
    return ["--late-after", f"{late_after_s:g}s" if late_after_s else NEVER]


def patience_flags(stuck_after_s: float, hang_after_s: float) -> list[str]:
    """The options of `holdfast run` that give these settings."""
    default = Limits()
    words = []
    for option, seconds, usual in (
        ("--stuck-after", stuck_after_s, default.stuck_s),
        ("--hang-after", hang_after_s, default.hang_s),
    ):
        if seconds != usual:
            words += [option, f"{seconds:g}s" if seconds else NEVER]
    return words
