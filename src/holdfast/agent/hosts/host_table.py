"""What the ring knows of the other hosts, in a file of the run directory: `holdfast status` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.detection.neighbours import SILENT, Row
from holdfast.detection.progress import Level
from holdfast.placement.directory import replace_file

TABLE = "hosts.json"
WRITE_S = 1.0


class HostTable:
    """Belongs to the agent's main thread, which writes it once a second."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / TABLE
        self._write_at = 0.0

    def look(self, rows: Sequence[Row], now: float) -> None:
        if now < self._write_at:
            return
        self._write_at = now + WRITE_S
        with suppress(OSError):  # what stands there gets old, and says so
            replace_file(self._path, json.dumps({"t": time.time(), "hosts": [asdict(row) for row in rows]}))


def read_table(directory: Path) -> tuple[float, list[dict[str, Any]]]:
    """How old it is, and its rows; nothing if there is none."""
    try:
        table = json.loads((directory / TABLE).read_text())
        return max(0.0, time.time() - float(table["t"])), [_row(row) for row in table["hosts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0, []


def _row(row: dict[str, Any]) -> dict[str, Any]:
    crew = row["crew"]
    return {
        "host": str(row["host"]),
        "level": str(row["level"]),
        "by": str(row["by"]),
        "phi": float(row["phi"]),
        "age_s": float(row["age_s"]),
        "step": int(crew["step"]),
        "workers": {level.words: int(count) for level, count in zip(Level, crew["counts"], strict=True) if count},
        "unwell": {str(worker): Level(level).words for worker, level in crew["unwell"]},
    }


def host_line(row: Mapping[str, Any]) -> str:
    """`h2 ok: 2 ok, at step 41, 0.3 s ago`; `h3 silent by h1 (phi 24.6): 1 ok, 1 hung (w1.1@h3 hung), …`."""
    if not row["workers"]:
        return f"{row['host']:<8} {row['level']}" + (f" by {row['by']}" if row["level"] == SILENT else "")
    who = f" by {row['by']} (phi {row['phi']:.1f})" if row["level"] == SILENT else ""
    counts = ", ".join(f"{count} {level}" for level, count in row["workers"].items())
    named = f" ({', '.join(f'{worker} {level}' for worker, level in row['unwell'].items())})" if row["unwell"] else ""
    return f"{row['host']:<8} {row['level']}{who}: {counts}{named}, at step {row['step']}, {row['age_s']:.1f} s ago"
