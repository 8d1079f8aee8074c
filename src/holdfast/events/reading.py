"""Reading event logs: all writers' files as one story, by time, while they are written, filled up and deleted.

A reader keeps for each writer where it is: the number of the last full file that it has had, and how far it is in the
next one, which may have been filled up meanwhile. It holds no file open and one piece of each in memory.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.events.log import SUFFIX, number_of, writer_of

PIECE_BYTES = 64 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
HEAD_BYTES = 64  # by which a file is known again: its first line has a time
Event: TypeAlias = dict[str, Any]


class EventReader:
    """Follows all logs of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, _Writer] = {}

    def poll(self) -> list[Event]:
        """What came since the last call, by time."""
        return list(self.stream())

    def stream(self, *, since: float = -math.inf) -> Iterator[Event]:
        """The same, a piece of each file in memory at a time. Go through to its end: what was read counts as had.

        Merged by time and, where that is the same, by view. A writer's own events stay in its order, whatever its clock
        does. `since` leaves out what is older.
        """
        found = self._look()
        streams = [self._writers[name].read(numbers, since) for name, numbers in sorted(found.items())]
        merged = heapq.merge(*streams, key=lambda item: item[0])
        return (event for _, event in merged if event["t"] >= since)

    def _look(self) -> dict[str, list[int]]:
        """Writers that may have something new -> the numbers of their full files, oldest first."""
        numbers: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    name, number = writer_of(entry.name), number_of(entry.name)
                    if number is not None:
                        numbers.setdefault(name, []).append(number)
                    elif entry.name.endswith(SUFFIX):
                        sizes[name] = _size(entry)
        except OSError:
            return {}
        found = {}
        for name in numbers.keys() | sizes.keys():
            writer = self._writers.setdefault(name, _Writer(self._directory / f"{name}{SUFFIX}"))
            full = sorted(numbers.get(name, ()))
            if writer.wants(full, sizes.get(name, 0)):
                found[name] = full
        return found


class _Writer:
    """How far we are with one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._had = 0  # the number of the last full file that we went through
        self._offset = 0  # in the one after it
        self._head = b""  # of that one
        self._skipping = False  # in a line that is none
        self._at = (-math.inf, 0)  # time and view of the last event: never goes back

    def wants(self, full: list[int], size: int) -> bool:
        return size != self._offset or any(number > self._had for number in full)

    def read(self, full: list[int], since: float) -> Iterator[tuple[tuple[float, int], Event]]:
        for line in self._lines(full, since):
            event = parse(line)
            if event is None:
                continue
            view = event.get("view")
            # A clock that was set back would put this writer's events before their causes.
            self._at = max(self._at[0], event["t"]), view if type(view) is int else self._at[1]
            yield self._at, event

    def _lines(self, full: list[int], since: float) -> Iterator[bytes]:
        for number in full:
            if number > self._had:
                path = Path(f"{self._path}.{number}")
                if self._offset or not _is_older(path, since):
                    yield from self._lines_of(path)
                self._had, self._offset, self._head, self._skipping = number, 0, b"", False
        # Whoever opens it may find a newer one: then a full file has come since we looked, and both wait.
        yield from self._lines_of(self._path, unless=Path(f"{self._path}.{max([self._had, *full]) + 1}"))

    def _lines_of(self, path: Path, unless: Path | None = None) -> Iterator[bytes]:
        """From where we are to the end of the last whole line."""
        while True:
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return
            try:
                if unless is not None and unless.exists():
                    return
                if os.pread(file, len(self._head), 0) != self._head:
                    self._offset, self._head, self._skipping = 0, b"", False  # ours was deleted meanwhile
                piece = self._piece(file)
            finally:
                os.close(file)
            if not piece:
                return
            yield from piece.splitlines()

    def _piece(self, file: int) -> bytes:
        """Some whole lines, and past them; b"" if there are none."""
        size = PIECE_BYTES
        while True:
            data = os.pread(file, size, self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                break
            if size >= LINE_BYTES_MAX:  # nobody writes such lines
                self._offset, self._skipping = self._offset + len(data), True
            else:
                size *= 4
        if not end:
            return b""  # a line that is still being written waits for the next time
        piece = data[:end]
        if self._skipping:
            piece, self._skipping = piece[piece.find(b"\n") + 1 :] or b"\n", False
        self._offset += end
        self._head = self._head or os.pread(file, min(HEAD_BYTES, self._offset), 0)
        return piece


def parse(line: bytes) -> Event | None:
    """An event, or None for a line that a full disk or a kill has torn."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not {"t", "who", "kind"} <= event.keys():
        return None
    return event if type(event["t"]) in (int, float) and math.isfinite(event["t"]) else None


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return -1  # just renamed: look at it


def _is_older(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime < since
    except OSError:
        return True


def read_events(directory: Path) -> list[Event]:
    """All events of a run so far, by time."""
    return EventReader(directory).poll()
