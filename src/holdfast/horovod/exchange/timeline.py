"""A timeline of collectives as a Chrome trace (chrome://tracing, Perfetto): one row for each name, what it was in when.

Written as it happens, so that a trace of a process that was killed can still be read: the format allows the closing
bracket to be missing.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

from holdfast.core.errors import ConfigError

ROWS_MAX = 100_000


class Timeline:
    """Owned by the exchange; any thread may write."""

    def __init__(self, path: Path, rank: int, *, mark_cycles: bool = False) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("w")
        except OSError as error:
            raise ConfigError(
                f"the timeline cannot be written to {path}: {error.strerror or error}",
                hint="give start_timeline a file in a directory that is there and writable",
            ) from error
        self._rank = rank
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._first = True
        self._file.write("[\n")

    def began(self, name: str, what: str, **about: Any) -> None:
        self._write({"name": what, "ph": "B", "tid": self._row(name), "args": about})

    def ended(self, name: str) -> None:
        self._write({"ph": "E", "tid": self._row(name)})

    def cycle(self) -> None:
        if self.mark_cycles:
            self._write({"name": "CYCLE_START", "ph": "i", "tid": self._row("cycles"), "s": "g"})

    def close(self) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None and len(self._rows) < ROWS_MAX:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}})
        return row or 0

    def _write(self, event: dict[str, Any]) -> None:
        event |= {"pid": self._rank, "ts": time.monotonic_ns() / 1000}
        with self._lock:
            if self._file.closed:
                return
            self._file.write("" if self._first else ",\n")
            self._first = False
            self._file.write(json.dumps(event, separators=(",", ":")))
            self._file.flush()
