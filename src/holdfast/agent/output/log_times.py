"""When workers said what: a small file beside their logs, which have only what was printed.

The agent reads the logs as they grow. Each time it notes how far it has come: `T OFFSET WORKER`, a line each. What
lies before an offset was printed before that time. So `holdfast logs` can put the lines of all workers in order, to
about the agent's period of looking. While no agent runs nothing is noted, and the lines of that time count as printed
when the next one looks. The file is bounded: when it is full, every second note goes.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = "times"  # in the directory of logs
BYTES_MAX = 4 * 1024 * 1024


class LogTimes:
    """Writes the notes. Owned by the agent's main thread. A disk that refuses costs only the order of lines."""

    def __init__(self, logs: Path, *, wall_clock: Callable[[], float] = time.time, bytes_max: int = BYTES_MAX) -> None:
        self._path = logs / NAME
        self._wall_clock = wall_clock
        self._bytes_max = bytes_max

    def note(self, worker: str, offset: int) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(f"{self._wall_clock():.3f} {offset} {worker}\n".encode())
                full = file.tell() > self._bytes_max
            if full:
                self._thin_out()
        except OSError:
            pass

    def _thin_out(self) -> None:
        seen: dict[bytes, int] = {}
        kept = []
        with self._path.open("rb") as file:
            for line in file:
                worker = line.rpartition(b" ")[2]
                seen[worker] = seen.get(worker, 0) + 1
                if seen[worker] % 2:
                    kept.append(line)
        partial = self._path.with_suffix(".new")
        partial.write_bytes(b"".join(kept))
        partial.replace(self._path)


@dataclass
class Times:
    """Of one log, in order: up to which offset it was read, and when."""

    offsets: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def of(self, position: int) -> float | None:
        """When the line that begins at `position` had been printed, at the latest; None: after the last note."""
        index = bisect_right(self.offsets, position)
        return self.at[index] if index < len(self.at) else None


def read_times(logs: Path) -> dict[str, Times]:
    """By worker. What cannot be read is passed over."""
    found: dict[str, Times] = {}
    for at, offset, worker in _notes(logs / NAME):
        times = found.setdefault(worker, Times())
        if not times.offsets or offset > times.offsets[-1]:
            times.offsets.append(offset)
            times.at.append(at)
    return found


def _notes(path: Path) -> Iterator[tuple[float, int, str]]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        at, _, rest = line.partition(" ")
        offset, _, worker = rest.partition(" ")
        try:
            yield float(at), int(offset), worker
        except ValueError:
            continue
