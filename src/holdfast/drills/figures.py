"""What a drill measured: recovery times, goodput, throughput. Pure; all times come from the traces.

Recovery: from the fault to the next committed step. Where somebody is lost (killed, stopped, cut off, found wrong),
that is the first step in a view without the lost one. Goodput: the time that the quiet run took for the same steps,
over the time that they took here, while faults were injected.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.drills.checking import Outcome
from holdfast.drills.schedule import DoneFault
from holdfast.drills.trace import TraceEntry

LOSING = ("kill", "stop", "partition", "corrupt")  # faults that cost the run a member
BINS = 60


@dataclass(frozen=True)
class Figures:
    """`None`: there is not enough to measure it."""

    goodput: float | None  # while faults were injected
    goodput_of_all: float | None  # from the first step to the last
    recoveries_s: tuple[float | None, ...]  # of each fault
    pauses_s: tuple[float, ...]  # the longest time without a step from each fault to its recovery or its end
    throughput: tuple[tuple[float, float], ...]  # (seconds since the faults began, steps a second)
    quiet_steps_per_s: float

    @property
    def recovered_s(self) -> list[float]:
        return [one for one in self.recoveries_s if one is not None]


def recovered_at(done: DoneFault, entries: Iterable[TraceEntry], views: Mapping[int, Sequence[str]]) -> float | None:
    """When the first step after the fault was committed; of entries by time."""
    for entry in entries:
        if entry.at <= done.at or entry.worker in done.victims:
            continue
        if done.planned.kind not in LOSING:
            return entry.at
        if done.ended_at is not None and entry.at > done.ended_at:
            return entry.at  # the cut was shorter than anybody's patience
        members = views.get(entry.view)
        if members is not None and entry.view > done.view and not set(members) & set(done.victims):
            return entry.at
    return None


def measure(quiet: Outcome, faulty: Outcome, done: Sequence[DoneFault], *, began: float, ended: float) -> Figures:
    """`began`, `ended`: when faults were injected, in seconds since 1970."""
    views = {int(event["view"]): tuple(event.get("members", ())) for event in faulty.of_kind("view")}
    entries = sorted(faulty.trace.entries, key=lambda entry: entry.at)
    since = faulty.went_back_at
    commits, usual = faulty.trace.commits(since), quiet.trace.commits()
    recoveries = [recovered_at(one, entries, views) for one in done]
    times = sorted(commits.values())
    return Figures(
        goodput=_ratio(usual, commits, began, ended),
        goodput_of_all=_ratio(usual, commits, 0.0, float("inf")),
        recoveries_s=tuple(None if at is None else at - one.at for at, one in zip(recoveries, done, strict=True)),
        pauses_s=tuple(_pause(times, one, at) for at, one in zip(recoveries, done, strict=True)),
        throughput=tuple(_throughput(times, began)),
        quiet_steps_per_s=_pace(sorted(usual.values())),
    )


def _ratio(usual: Mapping[int, float], commits: Mapping[int, float], began: float, ended: float) -> float | None:
    steps = sorted(step for step, at in commits.items() if began <= at <= ended and step in usual)
    if len(steps) < 2:
        return None
    first, last = steps[0], steps[-1]
    took_s = commits[last] - commits[first]
    return (usual[last] - usual[first]) / took_s if took_s > 0 else None


def _pause(times: Sequence[float], done: DoneFault, recovered: float | None) -> float:
    until = max(at for at in (done.at, done.ended_at, recovered) if at is not None)
    inside = [done.at, *(at for at in times if done.at < at <= until), until]
    return max(after - before for before, after in pairwise(inside))


def _throughput(times: Sequence[float], began: float) -> Iterable[tuple[float, float]]:
    if len(times) < 2:
        return
    width = max(1.0, (times[-1] - times[0]) / BINS)
    start, place = times[0], 0
    while start + width <= times[-1]:
        count = 0
        while place < len(times) and times[place] < start + width:
            place, count = place + 1, count + 1
        yield start + width / 2 - began, count / width
        start += width


def _pace(times: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(times)]
    usual = statistics.median(gaps) if gaps else 0.0
    return 1 / usual if usual > 0 else 0.0


def flat(figures: Figures, quiet: Outcome, faulty: Outcome, done: Sequence[DoneFault]) -> dict[str, Any]:
    """By name, for programs."""
    recovered = sorted(figures.recovered_s)
    return {
        "steps": len(faulty.history()),
        "quiet_steps": len(quiet.history()),
        "digest": faulty.digest,
        "quiet_digest": quiet.digest,
        "faults": len(done),
        "goodput": _rounded(figures.goodput),
        "goodput_of_all": _rounded(figures.goodput_of_all),
        "recovery_median_s": _rounded(statistics.median(recovered) if recovered else None),
        "recovery_worst_s": _rounded(recovered[-1] if recovered else None),
        "longest_pause_s": _rounded(max(figures.pauses_s, default=None)),
        "quiet_steps_per_s": _rounded(figures.quiet_steps_per_s),
        "views": len({event["view"] for event in faulty.of_kind("view")}),
        "workers_started": len(faulty.of_kind("worker_started")),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
