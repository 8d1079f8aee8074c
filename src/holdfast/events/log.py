"""Writing event logs.

Each agent and each worker appends to a file of its own, so no two writers share one and none needs a lock between
processes. A full disk stops the log, never the training; when there is room again it goes on and says what was lost.

`w0.1.jsonl` is the file that is written. When it is full it becomes `w0.1.jsonl.1`, the next one `.2`, and so on: a
number is never used twice, so that a reader always knows what it has had. The oldest are deleted, by the writer when it
has FILES_MAX, and by the agent (`prune`) where all of a run's together are too many.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from holdfast.core.events import KINDS

SUFFIX = ".jsonl"
FILE_BYTES_MAX = 4 * 1024 * 1024
FILES_MAX = 8  # of one writer
RUN_BYTES_MAX = 1024 * 1024 * 1024  # of all writers of a run on one host
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class EventLog:
    """Appends events to `path`. `None` writes nothing: a run of one has no run directory."""

    def __init__(
        self,
        path: Path | None,
        who: str,
        *,
        wall_clock: Callable[[], float] = time.time,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
    ) -> None:
        self._path = path
        self._who = who
        self._wall_clock = wall_clock
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0
        self._last = 0  # the number of the newest full file
        self._lost = 0  # events since the log stopped
        self.failed = ""  # why the log stopped, if it did

    def write(self, kind: str, **fields: Any) -> None:
        assert kind in KINDS, kind
        assert not set(fields) - set(KINDS[kind]), (kind, fields)
        if self._path is None:
            return
        line = self._line(kind, fields)
        with self._lock:
            try:
                if self._lost:
                    text = f"{self._lost} events could not be written: {self.failed}"
                    line = self._line("warning", {"text": text}) + line
                self._append(line)
                self.failed, self._lost = "", 0
            except OSError as error:
                self.failed = error.strerror or str(error)
                self._lost += 1
                self._close()  # the next one looks anew at what is there

    def _line(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"t": round(self._wall_clock(), 6), "who": self._who, "kind": kind, **fields}
        try:
            text = json.dumps(event, separators=(",", ":"), default=str, allow_nan=False)
        except ValueError:  # a loss, say: JSON has no word for what is not finite
            text = json.dumps(_finite(event), separators=(",", ":"), default=str)
        return text.encode() + b"\n"

    def _append(self, line: bytes) -> None:
        """All of the line, or nothing of it and OSError."""
        if self._file < 0:
            self._open()
        if self._size and self._size + len(line) > self._file_bytes_max:
            self._turn()
        written = os.write(self._file, line)
        if written < len(line):
            # The disk is full, and has taken the beginning. Giving that back takes no room.
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _open(self) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last = max((number for number, _ in full_files(self._path)), default=self._last)
        self._file = os.open(self._path, _FLAGS, 0o666)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            # An earlier writer died in the middle of its last line.
            self._size += os.write(self._file, b"\n")

    def _turn(self) -> None:
        """The file is full: it gets the next number, and a new one is begun."""
        assert self._path is not None
        self._close()
        self._path.replace(f"{self._path}.{self._last + 1}")
        self._last += 1
        for number, path in full_files(self._path):
            if number <= self._last - (self._files_max - 1):
                path.unlink(missing_ok=True)
        self._open()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def full_files(path: Path) -> list[tuple[int, Path]]:
    """The full files of the writer of `path`, oldest first."""
    return sorted(
        (number, found) for found in path.parent.glob(f"{path.name}.*") if (number := number_of(found.name)) is not None
    )


def number_of(name: str) -> int | None:
    """12 for `w0.1.jsonl.12`; None for a file that is still written, and for anything else."""
    _, _, number = name.rpartition(f"{SUFFIX}.")
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def writer_of(name: str) -> str:
    """`w0.1` for `w0.1.jsonl` and `w0.1.jsonl.12`."""
    return name.rpartition(SUFFIX)[0]


def prune(directory: Path, writing: Collection[str], *, bytes_max: int = RUN_BYTES_MAX) -> int:
    """Delete the oldest files where all are more than `bytes_max`. Returns how many bytes are left.

    What `writing` writers write to stays, and so does the newest full file of each: readers tell by it what they have
    had. The agent's stay: they are few, and say who lived when.
    """
    found = [(entry.name, entry.stat()) for entry in os.scandir(directory) if SUFFIX in entry.name]
    newest: dict[str, int] = {}
    for name, _ in found:
        newest[writer_of(name)] = max(newest.get(writer_of(name), 0), number_of(name) or 0)
    total = sum(stat.st_size for _, stat in found)
    for name, stat in sorted(found, key=lambda one: one[1].st_mtime):
        if total <= bytes_max:
            break
        writer, number = writer_of(name), number_of(name)
        needed = writer in writing and (number is None or number == newest[writer])
        if not needed and writer != "agent":
            (directory / name).unlink(missing_ok=True)
            total -= stat.st_size
    return total


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
