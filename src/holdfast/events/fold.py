"""What a run's events tell, in bounded memory however many there are. Pure; story.py shows it.

Bounds: a lane for each slot, of so many stretches (lanes.py); series and marks that get coarser (series.py); the newest
events of each kind, those that every worker tells only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.core.words import host_of, incarnation_of, slot_of
from holdfast.events import lanes as l
from holdfast.events.lanes import Lane
from holdfast.events.series import Mark, Marks, Series, number_of
from holdfast.events.telling import describe

Event = Mapping[str, Any]

FAILURES: Final = ("failed", "killed", "hung", "died while no agent ran")
LANES_MAX = 2048
KINDS_MAX = 64  # no vocabulary of ours has so many
NAME_MAX = 80  # characters of a metric's name
METRICS_MAX = 12
RECENT: Final = {
    "progress": 8,
    "spent": 0,
    "rebalanced": 20,
    "registered": 40,
    "warning": 100,
    "worker_exited": 200,
    "view": 100,
}
RECENT_DEFAULT = 60
TOLD_MAX = 512
CHECKPOINTS_MAX = 40
RECOVERIES_MAX = 200
PACE_EVENTS = 40  # the speed is that of so many events of progress
THROUGHPUT = "samples_per_s"
# Told by every member; one of them is enough. The fields say which are the same.
_TOLD_BY_ALL: Final[dict[str, tuple[str, ...]]] = {
    "view": ("view",),
    "lost": ("view", "peer"),
    "recovered": ("view",),
    "skipped": ("step",),
    "rewound": ("number",),
    "corruption": ("step", "where"),
}


class _Kind:
    """The newest events of a kind, and how many there were; `same`: the fields of one that all tell."""

    __slots__ = ("count", "recent", "same")

    def __init__(self, same: tuple[str, ...] | None, kept: int) -> None:
        self.same = same
        self.count = 0
        self.recent: deque[tuple[int, Event]] = deque(maxlen=kept)


class Fold:
    """What the events so far tell. `number` is how many there were: a reader that has it can ask for the rest."""

    def __init__(self) -> None:
        self.number = 0
        self.began: float | None = None
        self.last = 0.0
        self.agent = ""  # "", "running" or "ended", as far as the events tell
        self.ended = ""  # why the last agent ended
        self.size = 0
        self.spares = 0
        self.script = ""
        self.step = 0
        self.steps = 0
        self.metrics: Mapping[str, Any] = {}
        self.samples_per_s = 0.0
        self.view = 0
        self.members: tuple[str, ...] = ()
        self.view_reason = ""
        self.failures = 0
        self.evictions = 0
        self.rewinds = 0
        self.skipped = 0
        self.finished: dict[str, Any] | None = None
        self.digests: set[str] = set()
        self.lanes: dict[str, Lane] = {}
        self._lanes_by_worker: dict[str, Lane] = {}
        self.slow: dict[str, float] = {}  # who is, and how many times as long a shard takes it
        self._rates = Series()
        self.series: dict[str, Series] = {THROUGHPUT: self._rates}
        self.marks = Marks()
        self.checkpoints: deque[dict[str, Any]] = deque(maxlen=CHECKPOINTS_MAX)
        self.recoveries: deque[tuple[int, float]] = deque(maxlen=RECOVERIES_MAX)  # (view, seconds)
        self.recovered = 0  # how many times in all
        self.cut_off: set[str] = set()  # who cannot reach the ledger
        self.unsaved: set[str] = set()  # who cannot save
        self.waiting: dict[str, str] = {}  # who does not get on, and why
        self._shares: dict[str, int] = {}
        self._paces: dict[str, float] = {}
        self._pids: dict[str, int] = {}  # of living workers, by id
        self._unsettled: set[str] = set()  # lanes that a step brings to computing
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_EVENTS)
        self._kinds: dict[str, _Kind] = {}
        self._told: dict[tuple[Any, ...], None] = {}
        self._checkpoints_changed = 0
        self._crew_changed = 0
        self._handlers: dict[str, Callable[[Event, float], None]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_on_")
        }

    # -- taking events -------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Take one event. What is missing in it or wrong is passed over: a log is never a reason to fail."""
        self.number += 1
        try:
            kind, at = event["kind"], event["t"]
            if at > self.last:
                self.last = at
                if self.began is None:
                    self.began = at
            handler = self._handlers.get(kind)
            if handler is not None:
                handler(event, at)
            known = self._kinds.get(kind) or self._new_kind(kind)
            known.count += 1
            if known.same is None or self._is_new(kind, known.same, event):
                known.recent.append((self.number, event))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            pass

    def _new_kind(self, kind: str) -> _Kind:
        if len(self._kinds) >= KINDS_MAX:
            raise ValueError("no vocabulary of ours has so many")
        known = self._kinds[kind] = _Kind(_TOLD_BY_ALL.get(kind), RECENT.get(kind, RECENT_DEFAULT))
        return known

    def _is_new(self, kind: str, same: tuple[str, ...], event: Event) -> bool:
        key = (kind, *(event.get(name) for name in same))
        if key in self._told:
            return False
        self._told[key] = None
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        return True

    @property
    def counts(self) -> dict[str, int]:
        return {kind: known.count for kind, known in self._kinds.items()}

    @staticmethod
    def _lane_name(worker: str) -> str:
        """`w3` for `w3.2`, `w3@alpha` for `w3.2@alpha`."""
        slot, _, rest = worker.partition(".")
        host = rest.partition("@")[2]
        return f"{slot}@{host}" if host else slot

    def _lane(self, worker: object) -> Lane | None:
        """The lane of a worker; None if that is no worker's name, or one whose slot has a newer one."""
        name = str(worker)
        known = self._lanes_by_worker.get(name)
        if known is not None and known.worker == name:
            return known
        try:
            slot, host, incarnation = slot_of(name), host_of(name), incarnation_of(name)
        except (ValueError, IndexError):
            return None
        key = self._lane_name(name)
        lane = self.lanes.get(key)
        if lane is None:
            if len(self.lanes) >= LANES_MAX:
                return None
            lane = self.lanes[key] = Lane(key, (host, slot))
        if lane.worker and lane.worker != name and incarnation < incarnation_of(lane.worker):
            return None
        if len(self._lanes_by_worker) > 2 * LANES_MAX:
            self._lanes_by_worker.clear()
        self._lanes_by_worker[name] = lane
        return lane

    def _move(self, worker: object, state: str, at: float) -> None:
        lane = self._lane(worker)
        if lane is None:
            return
        lane.move(state, str(worker), at, self.number)
        if state in (l.JOINING, l.RECOVERING, l.PAUSED):
            self._unsettled.add(lane.name)
        else:
            self._unsettled.discard(lane.name)

    def _state_of(self, worker: object) -> str:
        lane = self._lane(worker)
        return lane.state if lane is not None and lane.worker == worker else l.GONE

    def _settle(self, worker: str, at: float) -> None:
        """It takes part in steps."""
        self._move(worker, l.SLOW if worker in self.slow else l.COMPUTING, at)

    def _mark(self, kind: str, event: Event, at: float, text: str, *, worker: str = "") -> None:
        step = event.get("step")
        self.marks.add(Mark(at, kind, worker, text[:500], step if type(step) is int else self.step), self.number)

    # -- the agent's events --------------------------------------------------------------------------------

    def _on_agent_started(self, event: Event, at: float) -> None:
        self.agent, self.ended = "running", ""
        self.size, self.spares = int(event.get("workers", 0)), int(event.get("spares", 0))
        self.script = str(event.get("script", ""))
        self.cut_off.discard("agent")

    def _on_agent_stopped(self, event: Event, at: float) -> None:
        self.agent, self.ended = "ended", str(event.get("reason", ""))

    def _on_scaled(self, event: Event, at: float) -> None:
        self.size = int(event["workers"])

    def _on_worker_started(self, event: Event, at: float) -> None:
        worker = str(event["worker"])
        self._pids[worker] = int(event["pid"])
        self._move(worker, self._arriving(), at)

    def _on_worker_exited(self, event: Event, at: float) -> None:
        worker, reason = str(event["worker"]), str(event.get("reason", ""))
        for known in (self._pids, self.slow, self.waiting):
            known.pop(worker, None)
        self.cut_off.discard(worker)
        self.unsaved.discard(worker)
        failed, evicted = reason in FAILURES, reason == "evicted"
        self.failures += failed
        self.evictions += evicted
        self._move(worker, l.DEAD if failed or evicted else l.GONE, at)
        if failed or evicted:
            signal = event.get("signal")
            text = f"{worker} {reason}" + (f", signal {signal}" if signal else "")
            self._mark("failure" if failed else "evicted", event, at, text, worker=worker)

    def _on_hung(self, event: Event, at: float) -> None:
        self._move(event["worker"], l.PAUSED, at)

    def _on_run_finished(self, event: Event, at: float) -> None:
        self.finished = self.finished or dict(event)

    # -- the workers' events -------------------------------------------------------------------------------

    def _on_registered(self, event: Event, at: float) -> None:
        worker = str(event["who"])
        if worker not in self.members:
            self._move(worker, self._arriving(), at)

    def _arriving(self) -> str:
        """Who comes while the view is complete is a spare, however far it is."""
        living = sum(self._state_of(member) in l.LIVING for member in self.members)
        return l.SPARE if living and living >= self.size else l.JOINING

    def _on_view(self, event: Event, at: float) -> None:
        number = int(event["view"])
        if number <= self.view:
            return
        members = tuple(map(str, event["members"]))
        before, self.members, self.view = self.members, members, number
        self.view_reason = str(event.get("reason", ""))
        self._crew_changed = self.number
        if not before:
            for lane in self.lanes.values():
                lane.count_from(at, self.number)
        present = set(members)
        for worker in before:
            if worker not in present and self._state_of(worker) in l.LIVING:
                # Of our own the agent will tell how it ended; of other hosts' workers we hear no more.
                self._move(worker, l.PAUSED if worker in self._pids else l.DEAD, at)
        for worker in members:
            if self._state_of(worker) in (l.GONE, l.DEAD, l.SPARE):
                self._move(worker, l.JOINING, at)
        if len(members) >= self.size:
            for name in tuple(self._unsettled):
                lane = self.lanes[name]
                if lane.state == l.JOINING and lane.worker not in present:
                    self._move(lane.worker, l.SPARE, at)

    def _on_lost(self, event: Event, at: float) -> None:
        if self._state_of(event["who"]) in l.LIVING:
            self._move(event["who"], l.RECOVERING, at)

    def _on_recovered(self, event: Event, at: float) -> None:
        view, duration_s = int(event["view"]), number_of(event.get("duration_s"))
        self._settle(str(event["who"]), at)
        # Every survivor tells; the slowest counts, and each view once.
        if self.recoveries and self.recoveries[-1][0] == view:
            self.recoveries[-1] = (view, max(self.recoveries[-1][1], duration_s))
        else:
            self.recoveries.append((view, duration_s))
            self.recovered += 1

    def _on_joined(self, event: Event, at: float) -> None:
        self._settle(str(event["who"]), at)

    def _on_progress(self, event: Event, at: float) -> None:
        step = event["step"]
        if type(step) is not int:
            return
        self.step = step
        self.steps = int(event.get("steps") or self.steps)
        if self._pace and step < self._pace[-1][1]:
            self._pace.clear()  # the run went back
        self._pace.append((at, step))
        number, rate, metrics = self.number, event.get("samples_per_s"), event.get("metrics")
        if rate and type(rate) is float:
            self.samples_per_s = rate
            self._rates.add(at, step, rate, number)
        if metrics:
            for name, value in metrics.items():
                if type(value) is float or type(value) is int:
                    series = self.series.get(name) or self._new_series(name)
                    if series is not None:
                        series.add(at, step, value, number)
            self.metrics = metrics
        if self.waiting:
            self.waiting.clear()
        if self._unsettled and event.get("view") == self.view:
            for name in tuple(self._unsettled):
                lane = self.lanes[name]
                if lane.worker in self.members and at >= lane.stretches[-1][0]:
                    self._settle(lane.worker, at)

    def _new_series(self, name: str) -> Series | None:
        if name == THROUGHPUT or len(name) > NAME_MAX or len(self.series) > METRICS_MAX:
            return None
        series = self.series[name] = Series()
        return series

    def _on_rebalanced(self, event: Event, at: float) -> None:
        self._shares = {worker: int(number_of(count)) for worker, count in event["shards"].items()}
        self._paces = {worker: number_of(pace_s) for worker, pace_s in event["paces_s"].items()}
        self._crew_changed = self.number

    def _on_slow(self, event: Event, at: float) -> None:
        worker = str(event["worker"])
        self.slow[worker] = number_of(event.get("times"))
        if self._state_of(worker) in l.GOOD:
            self._move(worker, l.SLOW, at)

    def _on_no_longer_slow(self, event: Event, at: float) -> None:
        worker = str(event["worker"])
        self.slow.pop(worker, None)
        if self._state_of(worker) == l.SLOW:
            self._move(worker, l.COMPUTING, at)

    def _on_waiting(self, event: Event, at: float) -> None:
        worker = str(event["who"])
        if self._state_of(worker) in l.LIVING:
            self._move(worker, l.PAUSED, at)
            self.waiting[worker] = str(event.get("reason", ""))[:500]

    def _on_evicted(self, event: Event, at: float) -> None:
        if self._state_of(event["who"]) in l.LIVING:
            self._move(event["who"], l.PAUSED, at)

    def _on_left(self, event: Event, at: float) -> None:
        if self._state_of(event["who"]) in l.LIVING:
            self._move(event["who"], l.GONE, at)

    def _on_finished(self, event: Event, at: float) -> None:
        self.finished = dict(event)
        self.step = int(event["step"])
        if len(self.digests) < 16:
            self.digests.add(str(event.get("digest", "")))
        self._move(event["who"], l.GONE, at)

    def _on_checkpoint(self, event: Event, at: float) -> None:
        numbers = {name: number_of(event.get(name)) for name in ("bytes", "duration_s", "held_s")}
        uri = str(event.get("uri", ""))
        self.checkpoints.append(
            {"step": int(event["step"]), "t": round(at, 3), "uri": uri, "who": event["who"], **numbers}
        )
        self._checkpoints_changed = self.number
        self.unsaved.discard(str(event["who"]))

    def _on_resumed(self, event: Event, at: float) -> None:
        self.step = int(event["step"])
        self._mark("resumed", event, at, f"resumed from the checkpoint of step {self.step}")

    def _on_rewound(self, event: Event, at: float) -> None:
        if int(event["number"]) > self.rewinds:  # every worker tells
            self.rewinds = int(event["number"])
            self._mark("rewound", event, at, f"the run goes back: {event.get('reason')}")

    def _on_skipped(self, event: Event, at: float) -> None:
        if ("skipped", event["step"]) not in self._told:
            self.skipped += 1
            self._mark("skipped", event, at, f"step {event['step']} is skipped: {event.get('reason')}")

    def _on_corruption(self, event: Event, at: float) -> None:
        if ("corruption", event["step"], event.get("where")) not in self._told:
            self._mark("corruption", event, at, describe(event)["text"])

    def _on_storage_down(self, event: Event, at: float) -> None:
        if not self.unsaved:
            self._mark("storage", event, at, f"storage is away: {event.get('reason')}")
        if len(self.unsaved) < LANES_MAX:
            self.unsaved.add(str(event["who"]))

    def _on_storage_up(self, event: Event, at: float) -> None:
        self.unsaved.discard(str(event["who"]))

    def _on_ledger_down(self, event: Event, at: float) -> None:
        if not self.cut_off:
            self._mark("ledger", event, at, f"the ledger is away: {event.get('reason')}")
        if len(self.cut_off) < LANES_MAX:
            self.cut_off.add(str(event["who"]))

    def _on_ledger_up(self, event: Event, at: float) -> None:
        self.cut_off.discard(str(event["who"]))
