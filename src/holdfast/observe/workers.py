"""The workers of a run as its events tell of them: who lives, who is in the view, what each slot did when. Pure.

Part of the fold (fold.py), which gives it each event with its time and number. Bounds: a lane for each slot, of so many
stretches (lanes.py); workers that have ended are forgotten when there are too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from holdfast.core.words import host_of, incarnation_of, slot_of
from holdfast.events.telling import late_sentence, slow_sentence
from holdfast.observe import lanes as l
from holdfast.observe.lanes import Lane
from holdfast.observe.lost_elsewhere import LostElsewhere
from holdfast.observe.series import number_of

Event = Mapping[str, Any]
Value = TypeVar("Value")

FAILURES: Final = ("failed", "killed", "hung", "died while no agent ran")
WORKERS_KEPT = 4096
LANES_MAX = 2048
RECOVERIES_MAX = 100_000
REASON_MAX = 2000  # characters


@dataclass(slots=True)
class WorkerRecord:
    pid: int = 0
    state: str = "starting"  # starting, registered, member, finished, then how it ended
    alive: bool = True
    reduced_bytes: int = 0  # of gradients, so far
    memory_bytes: int = 0


class Slowness(NamedTuple):
    times: float  # how many times as long a shard takes it
    words: str


@dataclass(frozen=True)
class LeftOut:
    """So many of a worker's shards were left out by a robust rule; suspicion of 1 is too often."""

    left_out: int
    shards: int
    suspicion: float


class Workers:
    def __init__(self) -> None:
        self.by_id: dict[str, WorkerRecord] = {}
        self.size = 0  # how many this host shall have
        self.spares = 0
        self.view = 0  # the newest that was heard of
        self.view_reason = ""
        self.members: tuple[str, ...] = ()
        self.own_views = False  # each worker is in a view of its own, and all of them are members
        self.changed = 0  # the number of the event that last changed who is a member, or whose shards are whose
        self.failures_here = 0
        self.lost_elsewhere = 0
        self.evictions = 0
        self.recoveries_s: list[float] = []  # the slowest survivor's, of each view
        self.slow: dict[str, Slowness] = {}
        self.late: dict[str, str] = {}  # whom the others go on without, and since which step
        self.lates = 0  # how often they did
        self.liars: dict[str, int] = {}  # whose bits the others found wrong, and at which step
        self.left_out: dict[str, LeftOut] = {}  # how often a robust rule left out a worker's shards
        self.distrusted: dict[str, str] = {}  # who was evicted for that, and why
        self.waiting: dict[str, str] = {}  # who does not get on, and why
        self.cut_off: dict[str, float] = {}  # who cannot reach the ledger, since when; the agent may be one
        self.unsaved: dict[str, str] = {}  # who cannot save, and why
        self.lanes: dict[str, Lane] = {}
        self.shards: dict[str, int] = {}  # of each member
        self.paces_s: dict[str, float] = {}
        self._reduced_before = 0  # bytes, by workers that are forgotten
        self._members_view = 0  # the view whose members are known
        self._present: frozenset[str] = frozenset()  # the same members
        self._recovered_view = -1
        self._elsewhere = LostElsewhere()
        self._lanes_by_worker: dict[str, Lane] = {}
        self._unsettled: set[str] = set()  # lanes that a step brings to computing

    @property
    def failures(self) -> int:
        return self.failures_here + self.lost_elsewhere

    @property
    def reduced_bytes(self) -> int:
        return self._reduced_before + sum(known.reduced_bytes for known in self.by_id.values())

    def worker(self, name: object) -> WorkerRecord:
        known = self.by_id.get(str(name))
        if known is None:
            if len(self.by_id) >= WORKERS_KEPT:
                for old in [name for name, known in self.by_id.items() if not known.alive][: WORKERS_KEPT // 2]:
                    self._reduced_before += self.by_id.pop(old).reduced_bytes
            known = self.by_id[str(name)] = WorkerRecord()
        return known

    def pid_of(self, worker: str) -> int | None:
        """Of one that lives, as far as its agent has told."""
        known = self.by_id.get(worker)
        return known.pid or None if known is not None and known.alive else None

    # -- lanes ---------------------------------------------------------------------------------------------

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
        key = lane_name(name)
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

    def _move(self, worker: object, state: str, at: float, number: int) -> None:
        lane = self._lane(worker)
        if lane is None:
            return
        lane.move(state, str(worker), at, number)
        if state in (l.JOINING, l.RECOVERING, l.PAUSED):
            self._unsettled.add(lane.name)
        else:
            self._unsettled.discard(lane.name)

    def _move_living(self, worker: object, state: str, at: float, number: int) -> None:
        if self._lane_state(worker) in l.LIVING:
            self._move(worker, state, at, number)

    def _lane_state(self, worker: object) -> str:
        lane = self._lane(worker)
        return lane.state if lane is not None and lane.worker == worker else l.GONE

    def _settle(self, worker: str, at: float, number: int) -> None:
        """It takes part in steps."""
        self._move(worker, l.SLOW if worker in self.slow else l.COMPUTING, at, number)

    def _say(self, who: object, state: str) -> None:
        """What a worker that lives last said of itself."""
        known = self.by_id.get(who) or self.worker(who)  # type: ignore[call-overload]
        if known.alive:
            known.state = state

    def _arriving(self) -> str:
        """Who comes while the view is complete is a spare, however far it is."""
        living = sum(self._lane_state(member) in l.LIVING for member in self.members)
        return l.SPARE if living and living >= self.size else l.JOINING

    # -- the agent's events --------------------------------------------------------------------------------

    def on_agent_started(self, event: Event, at: float, number: int) -> None:
        self.cut_off.pop("agent", None)
        self.size, self.spares = int(event.get("workers", 0)), int(event.get("spares", 0))

    def on_scaled(self, event: Event, at: float, number: int) -> None:
        self.size = int(event["workers"])

    def on_worker_started(self, event: Event, at: float, number: int) -> None:
        worker = str(event["worker"])
        self.worker(worker).pid = int(event.get("pid", 0))
        self._move(worker, self._arriving(), at, number)

    def on_worker_exited(self, event: Event, at: float, number: int) -> None:
        worker, reason = str(event["worker"]), str(event.get("reason", "exited"))
        for known in (self.cut_off, self.unsaved, self.slow, self.late, self.waiting):
            known.pop(worker, None)
        self._goes(worker, number)
        record = self.worker(worker)
        failed, evicted = reason in FAILURES and record.state != "finished", reason == "evicted"
        record.alive, record.state = False, reason
        self.failures_here += failed
        self.evictions += evicted
        self._move(worker, l.DEAD if failed or evicted else l.GONE, at, number)

    def on_hung(self, event: Event, at: float, number: int) -> None:
        self._move(event["worker"], l.PAUSED, at, number)

    def on_standstill(self, event: Event, at: float, number: int) -> None:
        for worker in event.get("waits") or ():
            self._move(str(worker), l.PAUSED, at, number)

    # -- the view ------------------------------------------------------------------------------------------

    def on_registered(self, event: Event, at: float, number: int) -> None:
        worker = str(event["who"])
        self._say(worker, "registered")
        if worker not in self._present:
            self._move(worker, self._arriving(), at, number)

    def on_view(self, event: Event, at: float, number: int) -> None:
        view = int(event["view"])
        if event.get("own"):
            self._members_view = self.view = max(view, self.view)
            self.own_views = True
            if event["who"] not in self._present:
                self._replace_members((*self.members, str(event["who"])), at, number)
            self._say(event["who"], "member")
            return
        if view > self._members_view:
            self._members_view, self.view = view, max(view, self.view)
            self.lost_elsewhere += self._elsewhere.feed(event)
            self._replace_members(tuple(map(str, event["members"])), at, number)
            self.view_reason = str(event.get("reason", ""))
        if event["who"] in (self._present if view == self._members_view else event["members"]):
            self._say(event["who"], "member")

    def _replace_members(self, members: tuple[str, ...], at: float, number: int) -> None:
        before, self.members, self.changed = self.members, members, number
        if not before:
            for lane in self.lanes.values():
                lane.count_from(at, number)
        present = self._present = frozenset(members)
        for worker in before:
            if worker not in present:
                # Of our own the agent will tell how it ended; of other hosts' workers we hear no more.
                self._move_living(worker, l.PAUSED if self.pid_of(worker) else l.DEAD, at, number)
        for worker in members:
            if self._lane_state(worker) in (l.GONE, l.DEAD, l.SPARE):
                self._move(worker, l.JOINING, at, number)
        if len(members) >= self.size:
            for name in tuple(self._unsettled):
                lane = self.lanes[name]
                if lane.state == l.JOINING and lane.worker not in present:
                    self._move(lane.worker, l.SPARE, at, number)

    def _goes(self, worker: str, number: int) -> None:
        """A member that is in no view but its own takes nobody else along."""
        if self.own_views and worker in self._present:
            self.members = tuple(member for member in self.members if member != worker)
            self._present, self.changed = frozenset(self.members), number

    def on_staleness(self, event: Event, at: float, number: int) -> None:
        """It has made updates: it takes part."""
        if self._lane_state(event["who"]) in (l.JOINING, l.PAUSED, l.SPARE):
            self._settle(str(event["who"]), at, number)

    def on_lost(self, event: Event, at: float, number: int) -> None:
        self._elsewhere.feed(event)
        self._move_living(event["who"], l.RECOVERING, at, number)

    def on_recovered(self, event: Event, at: float, number: int) -> None:
        """Every survivor tells; the slowest counts, and each view once."""
        view, duration_s = int(event["view"]), number_of(event.get("duration_s"))
        self._settle(str(event["who"]), at, number)
        if view == self._recovered_view:
            self.recoveries_s[-1] = max(self.recoveries_s[-1], duration_s)
        elif len(self.recoveries_s) < RECOVERIES_MAX:
            self._recovered_view = view
            self.recoveries_s.append(duration_s)

    def on_joined(self, event: Event, at: float, number: int) -> None:
        self._say(event["who"], "member")
        self._settle(str(event["who"]), at, number)

    def on_progress(self, event: Event, at: float, number: int) -> None:
        """One of the members speaks for all: a step takes everyone. Where each is in its own view, for itself."""
        self._say(event["who"], "member")
        if self.own_views:
            return
        if self.waiting:
            for member in self.members:
                self.waiting.pop(member, None)
        view = event.get("view") or 0
        if view > self.view:
            self.view = int(view)
        if self._unsettled and view == self._members_view:
            for name in tuple(self._unsettled):
                lane = self.lanes[name]
                if lane.worker in self._present and at >= lane.stretches[-1][0]:
                    self._settle(lane.worker, at, number)

    # -- how each of them does -----------------------------------------------------------------------------

    def heard(self, who: str) -> None:
        """It does something: only that it waits or what it has spent is told by those that do not."""
        self.waiting.pop(who, None)

    def on_spent(self, event: Event, at: float, number: int) -> None:
        known = self.worker(event["who"])
        known.reduced_bytes, known.memory_bytes = int(event["bytes"]), int(event["memory_bytes"])

    def on_rebalanced(self, event: Event, at: float, number: int) -> None:
        self.shards = {worker: int(number_of(count)) for worker, count in event["shards"].items()}
        self.paces_s = {worker: number_of(pace_s) for worker, pace_s in event["paces_s"].items()}
        self.changed = number

    def on_slow(self, event: Event, at: float, number: int) -> None:
        worker = str(event["worker"])
        _keep(self.slow, worker, Slowness(number_of(event.get("times")), slow_sentence(event)))
        if self._lane_state(worker) in l.GOOD:
            self._move(worker, l.SLOW, at, number)

    def on_no_longer_slow(self, event: Event, at: float, number: int) -> None:
        worker = str(event["worker"])
        self.slow.pop(worker, None)
        if self._lane_state(worker) == l.SLOW:
            self._move(worker, l.COMPUTING, at, number)

    def on_late(self, event: Event, at: float, number: int) -> None:
        self.lates += 1
        _keep(self.late, str(event["worker"]), late_sentence(event))

    def on_caught_up(self, event: Event, at: float, number: int) -> None:
        self.late.pop(str(event["worker"]), None)

    def on_corruption(self, event: Event, at: float, number: int) -> None:
        for liar in event.get("liars") or ():
            _keep(self.liars, str(liar), int(event["step"]))

    def on_left_out(self, event: Event, at: float, number: int) -> None:
        for worker, shards in dict(event["shards"]).items():
            out, suspicion = event["left_out"].get(worker, 0), event["suspicion"].get(worker, 0.0)
            _keep(self.left_out, str(worker), LeftOut(int(out), int(shards), float(suspicion)))
        self.changed = number

    def on_distrusted(self, event: Event, at: float, number: int) -> None:
        _keep(self.distrusted, str(event["worker"]), str(event.get("reason", ""))[:REASON_MAX])

    def on_waiting(self, event: Event, at: float, number: int) -> None:
        _keep(self.waiting, str(event["who"]), str(event.get("reason", ""))[:REASON_MAX])
        self._move_living(event["who"], l.PAUSED, at, number)

    def on_ledger_down(self, event: Event, at: float, number: int) -> None:
        _keep(self.cut_off, str(event["who"]), self.cut_off.get(str(event["who"]), at))

    def on_ledger_up(self, event: Event, at: float, number: int) -> None:
        self.cut_off.pop(str(event["who"]), None)

    def on_storage_down(self, event: Event, at: float, number: int) -> None:
        _keep(self.unsaved, str(event["who"]), str(event.get("reason", "")))

    def on_storage_up(self, event: Event, at: float, number: int) -> None:
        self.unsaved.pop(str(event["who"]), None)

    on_checkpoint = on_storage_up

    # -- how they end --------------------------------------------------------------------------------------

    def on_evicted(self, event: Event, at: float, number: int) -> None:
        self._say(event["who"], "evicted")
        self._goes(str(event["who"]), number)
        self._move_living(event["who"], l.PAUSED, at, number)

    def on_left(self, event: Event, at: float, number: int) -> None:
        self._say(event["who"], "leaving")
        self._goes(str(event["who"]), number)
        self._move_living(event["who"], l.GONE, at, number)

    def on_finished(self, event: Event, at: float, number: int) -> None:
        self._say(event["who"], "finished")
        self._goes(str(event["who"]), number)
        self._move(event["who"], l.GONE, at, number)


def lane_name(worker: str) -> str:
    """`w3` for `w3.2`, `w3@alpha` for `w3.2@alpha`."""
    slot, _, rest = worker.partition(".")
    host = rest.partition("@")[2]
    return f"{slot}@{host}" if host else slot


def _keep(known: dict[str, Value], name: str, value: Value) -> None:
    known[name] = value
    if len(known) > WORKERS_KEPT:
        del known[next(iter(known))]
