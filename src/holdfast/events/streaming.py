"""Reading all logs of a run in order of time, in bounded memory, and following them as they grow.

`EventReader` (reading.py) gives one event after the other. A long run's log has millions of them, and a page that waits
for all of them needs them fast: here they come in batches, parsed together and merged over all files, full ones
included. A batch is complete up to a moment: no file holds an event before it that was not given.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from holdfast.events.log import SUFFIX, number_of

PIECE_BYTES_MIN = 16 * 1024  # of a file, to begin with
PIECE_BYTES_MAX = 1024 * 1024  # of one that has much to tell
LINE_BYTES_MAX = 1024 * 1024  # a longer one is none of ours
LISTS_MAX = 512

_MEMBERS = b'"members":['
_LONG_LINE = 256
_HEAD_BYTES = 64
_NUMBERS = (float, int)
_time = itemgetter("t")


class _Source:
    """One file, wherever it has been renamed to: it is known by its inode and its first bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.waiting: list[dict[str, Any]] = []  # parsed, by time, not given yet
        self.is_read = False  # to its end, as of this round
        self._head = b""
        self._piece = PIECE_BYTES_MIN

    def fill(self, lists: Lists) -> int:
        """Read the next piece. How many bytes. Whoever is asked often reads more at once."""
        try:
            with self.path.open("rb", buffering=0) as file:
                if os.pread(file.fileno(), len(self._head), 0) != self._head:
                    self.is_read = True  # renamed just now, and this is another: the next look finds out
                    return 0
                data = self._read(file.fileno())
        except FileNotFoundError:
            self.is_read = True
            return 0
        end = data.rfind(b"\n") + 1  # a line that is still being written waits
        if not end and len(data) >= LINE_BYTES_MAX:
            end = len(data)  # passed over
        if not self.offset:
            self._head = data[: min(_HEAD_BYTES, end)]
        self.offset += end
        self._piece = min(2 * self._piece, PIECE_BYTES_MAX)
        self.waiting = parse(data[:end], lists)
        return end

    def _read(self, file: int) -> bytes:
        data = os.pread(file, self._piece, self.offset)
        self.is_read = len(data) < self._piece
        while not self.is_read and b"\n" not in data and len(data) < LINE_BYTES_MAX:
            more = os.pread(file, self._piece, self.offset + len(data))
            data += more
            self.is_read = len(more) < self._piece
        return data


class Lists:
    """The members of a view are in the events of all of them: one list serves for all."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def of(self, text: bytes) -> Any:
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= LISTS_MAX:
                self._known.clear()
            found = self._known[text] = json.loads(text)
        return found


def parse(data: bytes, lists: Lists | None = None) -> list[dict[str, Any]]:
    """The events in whole lines, by time. What is none is left out."""
    lines = data.splitlines()
    try:
        values = _at_once(lines, lists or Lists())
    except (ValueError, RecursionError):
        values = list(_one_by_one(lines))
    events = [
        event
        for event in values
        if type(event) is dict
        and type(event.get("t")) in _NUMBERS
        and "who" in event
        and type(event.get("kind")) is str
        and -math.inf < event["t"] < math.inf
    ]
    events.sort(key=_time)
    return events


def _at_once(lines: list[bytes], lists: Lists) -> list[Any]:
    """All lines together, which is much faster than one by one, and long lists of members each only once."""
    short, members = lines, {}
    if max(map(len, lines), default=0) > _LONG_LINE:
        short = list(lines)
        for place, line in enumerate(lines):
            begin = line.find(_MEMBERS) if len(line) > _LONG_LINE else -1
            if begin >= 0:
                end = line.index(b"]", begin) + 1
                members[place] = lists.of(line[begin + len(_MEMBERS) - 1 : end])
                short[place] = line[: begin + len(_MEMBERS) - 1] + b"0" + line[end:]
    values = json.loads(b"[" + b",".join(short) + b"]")
    if len(values) != len(lines):
        raise ValueError("a line that is not one value")
    for place, names in members.items():
        values[place]["members"] = names
    return list(values)


def _one_by_one(lines: list[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):  # torn by a full disk
            continue


class EventStream:
    """Follows all logs of a directory. Owned by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sources: dict[int, _Source] = {}
        self._lists = Lists()
        self.bytes_read = 0
        self.bytes_known = 0

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Everything that is there and was not given yet, by time. Ends at the end of the log; may be called again."""
        sources = self._find()
        for source in sources:
            source.is_read = False
        while sources:
            for source in sources:
                if not source.waiting and not source.is_read:
                    self.bytes_read += source.fill(self._lists)
            sources = [source for source in sources if source.waiting or not source.is_read]
            batch = _up_to(sources)
            if batch:
                yield batch

    def _find(self) -> list[_Source]:
        """Those that may have more."""
        self.bytes_known = 0
        found = []
        present = set()
        for entry in _listed(self._directory):
            if not entry.name.endswith(SUFFIX) and number_of(entry.name) is None:
                continue
            try:
                status = entry.stat()
            except OSError:
                continue
            self.bytes_known += status.st_size
            present.add(status.st_ino)
            source = self._sources.get(status.st_ino)
            if source is None or status.st_size < source.offset:
                source = self._sources[status.st_ino] = _Source(Path(entry.path))
            source.path = Path(entry.path)
            if status.st_size > source.offset:
                found.append(source)
        for inode in self._sources.keys() - present:
            del self._sources[inode]  # an old part of the log, deleted
        return found


def _up_to(sources: list[_Source]) -> list[dict[str, Any]]:
    """What is complete: no file that has more to read can have anything before its last event that was read."""
    limit = math.inf
    for source in sources:
        if not source.is_read:
            if not source.waiting:
                return []
            limit = min(limit, source.waiting[-1]["t"])
    batch: list[dict[str, Any]] = []
    for source in sources:
        waiting = source.waiting
        if waiting[0]["t"] > limit:
            continue
        if waiting[-1]["t"] <= limit:
            batch += waiting
            source.waiting = []
        else:
            count = bisect_right(waiting, limit, key=_time)
            batch += waiting[:count]
            source.waiting = waiting[count:]
    batch.sort(key=_time)
    return batch


def _listed(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
