"""Reading all logs of a run in order of time, in bounded memory, and following them as they grow.

`EventReader` (log.py) gives everything at once, which is right for what is new since a moment ago. A long run's log has
millions of events, which as objects do not fit into memory: here they come in batches, merged over all files, older
(rotated) halves included. A batch is complete up to a moment: no file holds an event before it that was not given.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from holdfast.events.log import SUFFIX, number_of

BYTES_AT_ONCE = 8 * 1024 * 1024  # over all files
BYTES_OF_FILE_MIN = 16 * 1024
LINE_BYTES_MAX = 1024 * 1024  # a longer one is none of ours

_time = itemgetter("t")


class _Source:
    """One file, wherever it has been renamed to: it is known by its inode."""

    def __init__(self, path: Path, inode: int) -> None:
        self.path = path
        self.inode = inode
        self.offset = 0
        self.waiting: list[dict[str, Any]] = []  # parsed, by time, not given yet
        self.is_read = False  # to its end, as of this round

    def fill(self, at_once: int) -> int:
        """Read a portion, if nothing waits. How many bytes."""
        if self.waiting:
            return 0
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self.inode:
                    self.is_read = True  # renamed just now: the next look finds it
                    return 0
                file.seek(self.offset)
                data = file.read(at_once)
                self.is_read = len(data) < at_once
                while not self.is_read and b"\n" not in data and len(data) < LINE_BYTES_MAX:
                    more = file.read(at_once)
                    data += more
                    self.is_read = len(more) < at_once
        except FileNotFoundError:
            self.is_read = True
            return 0
        end = data.rfind(b"\n") + 1  # a line that is still being written waits
        if not end and len(data) >= LINE_BYTES_MAX:
            end = len(data)  # passed over
        self.offset += end
        self.waiting = parse(data[:end])
        return end


def parse(data: bytes) -> list[dict[str, Any]]:
    """The events in whole lines, by time. What is none is left out."""
    lines = data.splitlines()
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")  # all at once: much faster than one by one
    except (ValueError, RecursionError):
        values = list(_one_by_one(lines))
    events = [event for event in values if _is_event(event)]
    events.sort(key=_time)
    return events


def _one_by_one(lines: list[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):  # torn by a full disk
            continue


def _is_event(event: Any) -> bool:
    if type(event) is not dict:
        return False
    at = event.get("t")
    return (
        (type(at) is float or type(at) is int)
        and "who" in event
        and type(event.get("kind")) is str
        and math.isfinite(at)
    )


class EventStream:
    """Follows all logs of a directory. Owned by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sources: dict[int, _Source] = {}
        self.bytes_read = 0
        self.bytes_known = 0

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Everything that is there and was not given yet, by time. Ends at the end of the log; may be called again."""
        self._find()
        sources = list(self._sources.values())
        for source in sources:
            source.is_read = False
        while sources:
            at_once = max(BYTES_OF_FILE_MIN, BYTES_AT_ONCE // len(sources))
            for source in sources:
                self.bytes_read += source.fill(at_once)
            sources = [source for source in sources if source.waiting or not source.is_read]
            batch = _up_to(sources)
            if batch:
                yield batch

    def _find(self) -> None:
        self.bytes_known = 0
        present = set()
        for entry in _listed(self._directory):
            if not entry.name.endswith(SUFFIX) and number_of(entry.name) is None:
                continue
            try:
                found = entry.stat()
            except OSError:
                continue
            self.bytes_known += found.st_size
            present.add(found.st_ino)
            source = self._sources.get(found.st_ino)
            if source is None or found.st_size < source.offset:
                self._sources[found.st_ino] = _Source(Path(entry.path), found.st_ino)
            else:
                source.path = Path(entry.path)
        for inode in self._sources.keys() - present:
            del self._sources[inode]  # the older half, written over by a newer one


def _up_to(sources: list[_Source]) -> list[dict[str, Any]]:
    """What is complete: no file that has more to read can have anything before its last event that was read."""
    limit = min((source.waiting[-1]["t"] for source in sources if source.waiting and not source.is_read), default=None)
    if any(not source.waiting and not source.is_read for source in sources):
        return []
    batch: list[dict[str, Any]] = []
    for source in sources:
        waiting = source.waiting
        if limit is None or waiting[-1]["t"] <= limit:
            batch += waiting
            source.waiting = []
        else:
            count = _first_after(waiting, limit)
            batch += waiting[:count]
            source.waiting = waiting[count:]
    batch.sort(key=_time)
    return batch


def _first_after(events: list[dict[str, Any]], limit: float) -> int:
    low, high = 0, len(events)
    while low < high:
        middle = (low + high) // 2
        if events[middle]["t"] <= limit:
            low = middle + 1
        else:
            high = middle
    return low


def _listed(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
