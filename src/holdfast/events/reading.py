"""Reading event logs: all writers' files as one story, by time, while they are written, filled up and deleted.

A reader keeps for each writer where it is: the number of the last full file that it has had, and how far it is in the
next one, which may have been filled up meanwhile. It holds no file open and one piece of each in memory, and gives what
is complete: no file holds an event that belongs before one that was given.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TypeAlias

from holdfast.events.log import SUFFIX, number_of, writer_of
from holdfast.events.parsing import Event, Lists, parse

PIECE_BYTES = 64 * 1024  # of a file, to begin with
PIECE_BYTES_MAX = 1024 * 1024  # of one that has much to tell
LINE_BYTES_MAX = 4 * 1024 * 1024  # nobody writes longer ones
HEAD_BYTES = 64  # by which a file is known again: its first line has a time
_Keyed: TypeAlias = tuple[float, int, int, Event]  # time, view, a number that no other has


class EventReader:
    """Follows all logs of a directory. Owned by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, _Writer] = {}
        self._numbers = count()
        self._lists = Lists()
        self.bytes_read = 0
        self.bytes_known = 0  # of all files that were there at the last look

    def poll(self) -> list[Event]:
        """What came since the last call, by time."""
        return list(self.stream())

    def stream(self, *, since: float = -math.inf) -> Iterator[Event]:
        """The same, one after the other. Go through to its end: what was read counts as had."""
        for batch in self.batches(since=since):
            yield from batch

    def batches(self, *, since: float = -math.inf) -> Iterator[list[Event]]:
        """The same, many at a time.

        Merged by time and, where that is the same, by view. A writer's own events stay in its order, whatever its clock
        does. `since` leaves out what is older.
        """
        writers = self._look(since)
        while writers:
            for writer in writers:
                if not writer.waiting and not writer.is_read:
                    self.bytes_read += writer.fill(self._lists, self._numbers)
            writers = [writer for writer in writers if writer.waiting or not writer.is_read]
            batch = [keyed[3] for keyed in _complete(writers) if keyed[3]["t"] >= since]
            if batch:
                yield batch

    def _look(self, since: float) -> list[_Writer]:
        """Those that may have something new."""
        numbers: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        self.bytes_known = 0
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    name, number = writer_of(entry.name), number_of(entry.name)
                    if number is None and not entry.name.endswith(SUFFIX):
                        continue
                    size = _size(entry)
                    self.bytes_known += max(size, 0)
                    if number is not None:
                        numbers.setdefault(name, []).append(number)
                    else:
                        sizes[name] = size
        except OSError:
            return []
        found = []
        for name in sorted(numbers.keys() | sizes.keys()):
            writer = self._writers.setdefault(name, _Writer(self._directory / f"{name}{SUFFIX}"))
            if writer.look(sorted(numbers.get(name, ())), sizes.get(name, 0), since):
                found.append(writer)
        return found


class _Writer:
    """How far we are with one writer."""

    def __init__(self, path: Path) -> None:
        self.waiting: list[_Keyed] = []  # read, and not given yet
        self.is_read = False  # to its end, as of the last look
        self._path = path
        self._full: list[int] = []  # the numbers of full files that are to be read before
        self._next = 1  # the number that the file which is written will have
        self._since = -math.inf
        self._had = 0  # the number of the last full file that we went through
        self._offset = 0  # in the one after it
        self._head = b""  # of that one
        self._piece_bytes = 0
        self._skipping = False  # in a line that is none
        self._at, self._view = -math.inf, 0  # of the last event; the time never goes back

    def look(self, full: list[int], size: int, since: float) -> bool:
        """What is there now; False if nothing of it is new."""
        if size == self._offset and not any(number > self._had for number in full):
            return bool(self.waiting)
        self._full = [number for number in full if number > self._had]
        self._next = max([self._had, *full]) + 1
        self._since = since
        self._piece_bytes = PIECE_BYTES
        self.is_read = False
        return True

    def fill(self, lists: Lists, numbers: Iterator[int]) -> int:
        """Read the next piece. How many bytes. Who has much to tell is asked for more at once."""
        began = self._offset
        piece = self._next_piece()
        while not piece and self._full:
            self._had, self._offset, self._head, self._skipping = self._full.pop(0), 0, b"", False
            began = 0
            piece = self._next_piece()
        if not piece:
            self.is_read = True
            return 0
        self._piece_bytes = min(2 * self._piece_bytes, PIECE_BYTES_MAX)
        self.waiting = list(self._keyed(parse(piece, lists), numbers))
        return self._offset - began

    def _keyed(self, events: list[Event], numbers: Iterator[int]) -> Iterator[_Keyed]:
        for event in events:
            view = event.get("view")
            later = event["t"] > self._at
            if later:  # a clock that was set back would put its events before their causes
                self._at = event["t"]
            if type(view) is int and (later or view > self._view):
                self._view = view
            yield self._at, self._view, next(numbers), event

    def _next_piece(self) -> bytes:
        """Whole lines from where we are on; b"" if there are none in this file."""
        if not self._full:
            # Whoever opens it may find a newer one: then a full file has come since we looked, and both wait.
            return self._read(self._path, unless=Path(f"{self._path}.{self._next}"))
        path = Path(f"{self._path}.{self._full[0]}")
        return self._read(path) if self._offset or not _is_older(path, self._since) else b""

    def _read(self, path: Path, unless: Path | None = None) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            if unless is not None and unless.exists():
                return b""
            if os.pread(file, len(self._head), 0) != self._head:
                self._offset, self._head, self._skipping = 0, b"", False  # ours was deleted meanwhile
            return self._lines(file)
        finally:
            os.close(file)

    def _lines(self, file: int) -> bytes:
        size = self._piece_bytes
        while True:
            data = os.pread(file, size, self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                break
            if size >= LINE_BYTES_MAX:
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


def _complete(writers: list[_Writer]) -> list[_Keyed]:
    """What is read as far as it is complete: who has more to read has nothing before the last that was read of it."""
    limit = (math.inf, 0)
    for writer in writers:
        if not writer.is_read:
            if not writer.waiting:
                return []
            limit = min(limit, writer.waiting[-1][:2])
    batch: list[_Keyed] = []
    for writer in writers:
        waiting = writer.waiting
        number = len(waiting) if waiting[-1][:2] <= limit else bisect_right(waiting, limit, key=lambda one: one[:2])
        batch += waiting[:number]
        writer.waiting = waiting[number:]
    batch.sort()
    return batch


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
