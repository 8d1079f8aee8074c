"""The workers' logs as lines: which there are, the last ones of each, all of them by time, and what is added.

No file is held open, and a piece of each is in memory: a run may have thousands of logs, and each may be large.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.output.log_times import Times, read_times
from holdfast.agent.output.tail import read_piece, shown

SUFFIX = ".log"
PIECE_BYTES = 64 * 1024  # also the longest line that is shown as one
_PARTS = re.compile(r"(\d+)")


@dataclass
class LogFile:
    name: str  # the worker's
    path: Path
    position: int = 0  # up to here its lines were given

    def lines(self, *, whole: bool) -> Iterator[tuple[int, str]]:
        """(where it begins, text) of each line that is new; with `whole`, also of one that does not end yet."""
        while True:
            data = read_piece(self.path, self.position, PIECE_BYTES)
            if data is None:
                return
            end = data.rfind(b"\n") + 1
            if not end and (whole or len(data) == PIECE_BYTES):
                end = len(data)
            if not end:
                return
            begin = self.position
            for piece in data[:end].removesuffix(b"\n").split(b"\n"):
                at, self.position = self.position, self.position + len(piece) + 1
                yield at, shown(piece)
            self.position = begin + end

    def skip_to_last(self, lines: int) -> None:
        """So that only the last so many are given."""
        try:
            with self.path.open("rb") as file:
                place = self.position = file.seek(0, 2)
                wanted = lines  # so many newlines before the first of them
                while place and wanted > 0:
                    size = min(PIECE_BYTES, place)
                    file.seek(place - size)
                    data = file.read(size)
                    if place == self.position and data.endswith(b"\n"):
                        wanted += 1  # this one only ends the last line
                    while wanted and (cut := data.rfind(b"\n")) >= 0:
                        wanted, data, self.position = wanted - 1, data[:cut], place - size + cut + 1
                    place -= size
                if wanted:
                    self.position = 0
        except OSError:
            pass


def log_files(logs: Path) -> list[LogFile]:
    """Those of a run, by slot and incarnation: w2.1 before w10.1."""
    try:
        paths = [path for path in logs.iterdir() if path.name.endswith(SUFFIX)]
    except OSError:
        return []
    return sorted((LogFile(path.name.removesuffix(SUFFIX), path) for path in paths), key=lambda log: _order(log.name))


def by_time(
    logs: Iterable[LogFile], times_in: Path, *, whole: bool, last: int | None = None
) -> Iterator[tuple[str, str]]:
    """(worker, line) of all of them, in the order in which they were printed, as far as that is known."""
    times = read_times(times_in)
    streams = []
    for log in logs:
        if last is not None:
            log.skip_to_last(last)
        streams.append(_timed(log, times.get(log.name, Times()), whole))
    merged = ((name, line) for _, name, line in heapq.merge(*streams, key=lambda item: item[0]))
    return merged if last is None else iter(deque(merged, maxlen=last))


def _timed(log: LogFile, times: Times, whole: bool) -> Iterator[tuple[float, str, str]]:
    try:
        changed = log.path.stat().st_mtime
    except OSError:
        changed = 0.0
    for position, line in log.lines(whole=whole):
        at = times.of(position)
        yield changed if at is None else at, log.name, line


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _PARTS.split(name)]
