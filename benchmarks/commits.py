"""What the workers of recovery.py say about their steps, and the arithmetic on it.

Times come from the survivors themselves: a step is committed when the last of them has applied it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

QUIET_STEPS = 20  # what counts as normal is the median over so many steps before the fault


@dataclass(frozen=True)
class Commit:
    """One worker's part in one step. `at` is in seconds since 1970."""

    at: float
    step: int
    shards: int
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one fault cost those who stayed."""

    to_commit_s: float  # from the fault to the next commit
    alone_s: float  # from the fault to the first commit of a step that the survivors computed alone, in a new view
    overhead_s: float  # beyond the rest of a normal step and the computing of the lost shards
    step_s: float  # a normal step before the fault
    wasted_shards: int  # computed by survivors although they had them


class CommitLog:
    """Follows the workers' files. Its owner calls `poll`; the rest is arithmetic on what has been read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[int, int] = {}
        self.workers: dict[int, list[Commit]] = {}

    def poll(self) -> None:
        for path in self._directory.glob("*.commits"):
            pid = int(path.stem)
            with path.open("rb") as file:
                file.seek(self._offsets.get(pid, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[pid] = self._offsets.get(pid, 0) + len(whole)
            for line in whole.decode().splitlines():
                at, step, shards, compute_s = line.split()
                commit = Commit(float(at), int(step), int(shards), float(compute_s))
                self.workers.setdefault(pid, []).append(commit)

    def gaps(self) -> int:
        """How often a worker's steps did not follow one another: steps skipped or applied twice."""
        return sum(
            later.step != earlier.step + 1 for commits in self.workers.values() for earlier, later in pairwise(commits)
        )

    def of(self, pids: Collection[int]) -> Steps:
        return Steps({pid: self.workers.get(pid, []) for pid in pids})


class Steps:
    """The steps that all of some workers have committed."""

    def __init__(self, workers: Mapping[int, list[Commit]]) -> None:
        parts: dict[int, list[Commit]] = {}
        for commits in workers.values():
            for commit in commits:
                parts.setdefault(commit.step, []).append(commit)
        self._parts = {step: found for step, found in sorted(parts.items()) if len(found) == len(workers)}

    def committed_at(self, step: int) -> float:
        return max(part.at for part in self._parts[step])

    def first_after(self, moment: float) -> int | None:
        return next((step for step in self._parts if self.committed_at(step) > moment), None)

    def has(self, *steps: int) -> bool:
        return all(step in self._parts for step in steps)

    def duration_s(self, step: int) -> float:
        return self.committed_at(step) - self.committed_at(step - 1)

    def compute_s(self, step: int) -> float:
        """Of the worker that computed longest: the others waited for it."""
        return max(part.compute_s for part in self._parts[step])

    def quiet(self, before: int) -> list[int]:
        return [step for step in range(before - QUIET_STEPS, before) if self.has(step, step - 1)]

    def normal_s(self, before: int) -> float:
        return statistics.median(map(self.duration_s, self.quiet(before)))

    def fault(self, moment: float, shards: int) -> Fault:
        """A worker that had handed in its shards is missed one step later, so the worse of two steps counts."""
        step = self.first_after(moment)
        assert step is not None and self.has(step, step + 1), "call this once two steps are committed"
        normal_s = self.normal_s(step)
        normal_compute_s = statistics.median(map(self.compute_s, self.quiet(step)))

        def overhead_s(step: int) -> float:
            due = max(moment, self.committed_at(step - 1) + normal_s)
            return self.committed_at(step) - due - max(0.0, self.compute_s(step) - normal_compute_s)

        computed_in = {s: sum(part.shards for part in self._parts[s]) for s in (step, step + 1)}
        computed = max(computed_in.values())
        alone = step if computed_in[step] >= shards else step + 1
        return Fault(
            to_commit_s=self.committed_at(step) - moment,
            alone_s=self.committed_at(alone) - moment,
            overhead_s=max(overhead_s(step), overhead_s(step + 1)),
            step_s=normal_s,
            wasted_shards=max(0, computed - shards),
        )
