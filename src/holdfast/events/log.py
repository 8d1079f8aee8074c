"""Writing and reading event logs.

Each agent and each worker appends to a file of its own, so no two writers share one and none needs a lock
between processes. A full disk stops the log, never the training. A file is bounded: past FILE_BYTES_MAX the
older half is dropped by renaming it to `.1`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core.events import KINDS

FILE_BYTES_MAX = 16 * 1024 * 1024


class EventLog:
    """Appends events to `path`. `None` writes nothing: a run of one has no run directory."""

    def __init__(self, path: Path | None, who: str, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._who = who
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._size = 0
        self.failed = ""  # why the log stopped, if it did

    def write(self, kind: str, **fields: Any) -> None:
        assert kind in KINDS, kind
        assert not set(fields) - set(KINDS[kind]), (kind, fields)
        if self._path is None:
            return
        event = {"t": round(self._wall_clock(), 6), "who": self._who, "kind": kind, **fields}
        line = json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
                self.failed = ""
            except OSError as error:
                self.failed = str(error)

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
            if self._size and not self._path.read_bytes().endswith(b"\n"):
                line = b"\n" + line  # an earlier writer died in the middle of its last line
        if self._size + len(line) > FILE_BYTES_MAX:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_suffix(".jsonl.1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        self._size += self._file.write(line)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class EventReader:
    """Follows all logs of a directory. `poll()` returns what came since the last call, by time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            events.extend(self._read(path))
        events.sort(key=lambda event: event["t"])
        return events

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < offset:  # rotated
                    offset = 0
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1  # a line that is still being written waits for the next call
        self._offsets[path] = offset + end
        for line in data[:end].splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # torn by a full disk
                continue
            if isinstance(event, dict) and {"t", "who", "kind"} <= event.keys() and type(event["t"]) in (int, float):
                yield event


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events of a run so far, by time."""
    return EventReader(directory).poll()
