"""What the rig in each worker wrote down: who applied which step when, in which view, with which bits.

One file for each worker, JSON lines. The first line, and one wherever the tensors change, has their names and how the
data is cut into shards; each of the others is one step that this worker has applied. Read without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACE = "HOLDFAST_DRILL_TRACE"  # the directory; the agent hands its environment on to the workers
DIGITS = 16


@dataclass(frozen=True)
class TraceEntry:
    """One step, as one worker applied it. `counted`: whose shards were added up; empty if it was sent the result."""

    worker: str
    step: int
    at: float
    view: int
    digests: str  # of all tensors, one after another
    counted: tuple[tuple[str, tuple[int, ...]], ...]
    ahead: str = ""  # of an iterable: the digest of the samples that the next step has
    epoch: int = 0  # with a sampler: that of the step
    samples: tuple[int, ...] = ()  # and which it has, if they are not too many


@dataclass
class Trace:
    """Of a whole run."""

    names: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    entries: list[TraceEntry] = field(default_factory=list)  # of each worker in its order

    def commits(self, since: float = 0.0) -> dict[int, float]:
        """When each step was first applied by anybody; `since`: the run went back then, and what is later counts."""
        found: dict[int, float] = {}
        for entry in sorted(self.entries, key=lambda entry: (entry.at <= since, entry.at)):
            found.setdefault(entry.step, entry.at)
        return found

    def of_worker(self) -> dict[str, list[TraceEntry]]:
        found: dict[str, list[TraceEntry]] = {}
        for entry in self.entries:
            found.setdefault(entry.worker, []).append(entry)
        return found

    def tensors_that_differ(self, one: str, other: str) -> list[str]:
        return [
            name
            for place, name in enumerate(self.names)
            if one[place * DIGITS : (place + 1) * DIGITS] != other[place * DIGITS : (place + 1) * DIGITS]
        ]


def trace_path(directory: Path, worker: str) -> Path:
    return directory / f"{worker}.trace"


def order_path(directory: Path, worker: str) -> Path:
    return directory / f"{worker}.order"


def result_path(directory: Path, worker: str) -> Path:
    return directory / f"{worker}.flipped"


class TraceReader:
    """Follows the traces of a directory. Owned by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self.trace = Trace()
        self.step = -1  # the newest that was applied
        self.begun: set[str] = set()  # workers that have applied a step, and so have the state

    def look(self) -> list[TraceEntry]:
        """What came since the last call."""
        fresh: list[TraceEntry] = []
        for path in sorted(self._directory.glob("*.trace")):
            fresh.extend(self._read(path))
        self.trace.entries.extend(fresh)
        return fresh

    def _read(self, path: Path) -> Iterable[TraceEntry]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1  # a line that is still being written waits
        self._offsets[path] = offset + end
        for line in data[:end].splitlines():
            entry = self._parse(path.name.removesuffix(".trace"), line)
            if entry is not None:
                self.step = max(self.step, entry.step)
                self.begun.add(entry.worker)
                yield entry

    def _parse(self, worker: str, line: bytes) -> TraceEntry | None:
        try:
            record = json.loads(line)
            if "names" in record:
                self.trace.names = tuple(map(str, record["names"]))
                self.trace.plan = dict(record["plan"])
                return None
            counted = tuple((str(member), tuple(map(int, shards))) for member, shards in record["c"])
            sampled = int(record.get("e", 0)), tuple(map(int, record.get("i", ())))
            bits = str(record["d"]), counted, str(record.get("n", "")), *sampled
            return TraceEntry(worker, int(record["s"]), float(record["t"]), int(record["v"]), *bits)
        except (KeyError, TypeError, ValueError, AttributeError):  # torn by a full disk
            return None
