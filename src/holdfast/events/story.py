"""The story of a run: what its events so far tell, and a picture of it. Pure.

The dashboard and `holdfast top` show it, for a run that goes on and for one that is over. `feed` takes one event
(fold.py), `picture` gives what is to be shown, as values that JSON knows: all of it, or only what has changed since an
event.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.events import lanes as l
from holdfast.events.accounting import Accounting
from holdfast.events.fold import Event, Fold
from holdfast.events.lanes import Lane
from holdfast.events.series import number_of
from holdfast.events.telling import describe

PROGRESS_HEARD = 8


class Story(Fold):
    """What the events so far tell. `number` is how many there were: a reader that has it can ask for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Accounting()
        self._spent_at = 0  # the number of the last event in which a worker told its account

    def feed(self, event: Event) -> None:
        super().feed(event)
        kind = event.get("kind")
        # Most of a long log is progress, which says of the time only that its teller lives: some of it is enough.
        if kind != "progress" or self.number % PROGRESS_HEARD == 0:
            self.time.feed(event)
        if kind == "spent":
            self._spent_at = self.number

    def state(self, *, agent: bool | None = None, lives: bool | None = None) -> str:
        """running, unattended, finished or stopped. `agent` and `lives` are what /proc says of agent and workers."""
        if self.finished is not None and not lives:
            return "finished"
        if self.agent == "running" and (agent or agent is None):
            return "running"
        if not self.number:
            return "starting"
        return "unattended" if lives else "stopped"

    def steps_per_s(self) -> float:
        if len(self._pace) < 2:
            return 0.0
        (first, begin), (last, end) = self._pace[0], self._pace[-1]
        return (end - begin) / (last - first) if last > first else 0.0

    def seconds(self, now: float) -> dict[str, float]:
        """The time of all slots, by state, since the first view."""
        total: dict[str, float] = {}
        for lane in self.lanes.values():
            for state, seconds in lane.seconds(now).items():
                total[state] = total.get(state, 0.0) + seconds
        return total

    def goodput(self, now: float) -> float | None:
        """Which part of the workers' time went into steps; spares cost nothing. By the workers' own accounts, or, where
        they keep none, by their lanes."""
        if self.time.told:
            return self.time.run(now).goodput
        seconds = self.seconds(now)
        spent = sum(value for state, value in seconds.items() if state not in l.IDLE)
        return sum(value for state, value in seconds.items() if state in l.GOOD) / spent if spent else None

    def accounts(self, now: float) -> dict[str, Any]:
        """Where the time went, by the workers' own accounts: of the run and of each slot, in seconds."""
        slots: dict[str, dict[str, float]] = {}
        for worker, spent in self.time.workers(now).items():
            lane = self._lane_name(worker)
            total = slots.setdefault(lane, {}) if lane in self.lanes else {}
            for category, seconds in spent.seconds.items():
                if seconds > 0:
                    total[category] = round(total.get(category, 0.0) + seconds, 3)
        run = {category: round(seconds, 3) for category, seconds in self.time.run(now).seconds.items() if seconds > 0}
        return {"run": run, "slots": slots}

    def header(self, now: float, *, state: str = "") -> dict[str, Any]:
        """`now` is the time of the last event where the run is over."""
        durations = sorted(duration for _, duration in self.recoveries)
        rate, goodput = self.steps_per_s(), self.goodput(now)
        state = state or self.state()
        going_on = state in ("running", "unattended") and rate > 0 and self.steps > self.step
        newest = self.checkpoints[-1] if self.checkpoints else None
        return {
            "state": state,
            "began": self.began,
            "last": self.last,
            "now": round(now, 3),
            "step": self.step,
            "steps": self.steps,
            "steps_per_s": round(rate, 4),
            "eta_s": round((self.steps - self.step) / rate, 1) if going_on else None,
            "samples_per_s": number_of(self.samples_per_s),
            "metrics": {name: number_of(value) for name, value in self.metrics.items() if name in self.series},
            "goodput": None if goodput is None else round(goodput, 4),
            "seconds": {state: round(value, 3) for state, value in self.seconds(now).items()},
            "failures": self.failures,
            "evictions": self.evictions,
            "rewinds": self.rewinds,
            "skipped": self.skipped,
            "recoveries": self.recovered,
            "recovery_median_s": durations[len(durations) // 2] if durations else None,
            "recovery_worst_s": durations[-1] if durations else None,
            "view": self.view,
            "view_reason": self.view_reason,
            "members": len(self.members),
            "size": self.size,
            "spares": self.spares,
            "checkpoint": newest,
            "ledger_away": len(self.cut_off),
            "storage_away": len(self.unsaved),
            "waiting": next(iter(self.waiting.values()), None),
            "digest": next(iter(self.digests)) if len(self.digests) == 1 else None,
            "digests": len(self.digests),
            "ended": self.ended or None,
            "events": self.number,
        }

    def crew(self) -> list[dict[str, Any]]:
        """Every slot's worker, in order: its process, its place in the view, its speed and shards."""
        rank = {worker: place for place, worker in enumerate(self.members)}
        return [
            {
                "lane": lane.name,
                "worker": lane.worker,
                "state": lane.state,
                "pid": self._pids.get(lane.worker),
                "rank": rank.get(lane.worker),
                "shards": self._shares.get(lane.worker) if lane.worker in rank else None,
                "pace_s": self._paces.get(lane.worker) if lane.worker in rank else None,
                "slow": self.slow.get(lane.worker),
            }
            for lane in self._ordered()
        ]

    def _ordered(self) -> list[Lane]:
        return sorted(self.lanes.values(), key=lambda lane: lane.order)

    def recent(self, since: int = 0, most: int = 600) -> list[dict[str, Any]]:
        """The newest events, newest first, with their numbers."""
        found = [pair for known in self._kinds.values() for pair in known.recent if pair[0] > since]
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [{"n": number, **describe(event)} for number, event in found[:most]]

    def picture(self, now: float, since: int = 0, *, state: str = "") -> dict[str, Any]:
        """What has changed since the event with this number; with 0, everything."""
        changed = [lane for lane in self._ordered() if lane.changed > since]
        picture: dict[str, Any] = {
            "number": self.number,
            "since": since,
            "header": self.header(now, state=state),
            "lanes": [lane.picture() for lane in changed],
            "series": {
                name: change for name, series in self.series.items() if (change := series.picture(since))["points"]
            },
            "events": self.recent(since),
            "counts": self.counts,
        }
        if changed or self._crew_changed > since or not since:
            picture["crew"] = self.crew()
        if self._spent_at > since:
            picture["accounts"] = self.accounts(now)
        if self.marks.changed > since or not since:
            picture["marks"] = self.marks.picture()
        if self._checkpoints_changed > since or not since:
            picture["checkpoints"] = list(self.checkpoints)
        return picture


def tell(events: Iterable[Event]) -> Story:
    """The story of these events."""
    story = Story()
    for event in events:
        story.feed(event)
    return story
