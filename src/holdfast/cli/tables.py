"""How the commands print tables, sizes and ages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime


def aligned(rows: Sequence[Sequence[str]], *, right: int) -> list[str]:
    """Columns under each other, the first `right` of them flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index < right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def clock_words(t: float | None, form: str, otherwise: str) -> str:
    """The time of day or the date; `otherwise` where it is none that a calendar has."""
    try:
        return otherwise if t is None else datetime.fromtimestamp(t).strftime(form)
    except (OverflowError, OSError, ValueError):
        return otherwise


def size_words(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def age_words(seconds: float) -> str:
    seconds = max(seconds, 0)
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
