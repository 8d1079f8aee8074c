"""Where the time of a run went: a fold over its events. Pure.

Every instant of a worker's life, from the start of its process to its end or to now, is in exactly one category of
core/spending.py, and so is every instant of a slot whose worker died and is to be replaced. A worker keeps its own
account and tells it now and then (`spent`). What lies before its account began is joining; what lies between its last
word and its end belongs to what it was doing. Before the run has its first view, a worker that joins is starting, as in
any run; where each worker is in a view of its own, before the run's first progress. While the run has as many members
as it wants, because a spare has stepped in, a slot that is empty and a worker that starts cost nothing: that is
standing by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.spending import CATEGORIES, DOWN, JOINING, LEFT_OUT, LOST, OWN, STANDBY, STARTING
from holdfast.core.words import host_of, is_worker, slot_of

WORKERS_KEPT = 4096  # whose shares are told one by one; those of more that have ended are in the sum
# A slot that one of these has left empty waits for another; who left for other reasons is not replaced.
_REPLACED = ("failed", "killed", "hung", "evicted", "died while no agent ran")

_STRENGTH = ("agent_started", "scaled", "view", "worker_exited")


@dataclass
class _Life:
    start: float
    last: float  # when it was last heard of
    full_s: float = 0.0  # how long the run had been at full strength when this one started
    idle_s: float | None = None  # how long it was so while this one started, once it has
    end: float | None = None
    told: float | None = None  # when it last told of its account
    seconds: dict[str, float] = field(default_factory=dict)
    doing: str = JOINING


@dataclass(frozen=True)
class Spent:
    """Seconds of each category; all of CATEGORIES are there."""

    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """The part of the time, but for starting and for spares that stand by, that was not lost: neither to
        recovering, nor to checkpointing, joining or an empty slot. None before any time has passed."""
        counted = self.total_s - math.fsum(self.seconds[category] for category in LEFT_OUT)
        lost = math.fsum(self.seconds[category] for category in LOST)
        return max(0.0, 1.0 - lost / counted) if counted > 0 else None

    def share(self, category: str) -> float:
        return self.seconds[category] / self.total_s if self.total_s > 0 else 0.0

    def words(self) -> str:
        """`computing 81.2 %, waiting 9.1 %, …`: the shares, largest first, which add up to 100 %."""
        shares = sorted(((self.share(category), category) for category in CATEGORIES), reverse=True)
        shown = [(share, category) for share, category in shares if share >= 0.0005]
        return ", ".join(f"{category} {share:.1%}".replace("%", " %") for share, category in shown)


class Accounting:
    """Takes events in order. Fields that are missing or wrong are passed over."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._past = _nothing()  # of workers that have ended and are no longer kept, and of slots that were empty
        self._empty: dict[str, tuple[float, float]] = {}  # slots whose worker died -> since when, and full_s then
        self._strength = _Strength()
        self._first_view: float | None = None
        self._own_views = False
        self.last = -math.inf
        self.told = False  # some worker has kept an account: those of other programs do not

    def heard(self, who: str, when: float) -> None:
        """The same as `feed`, of an event that says of the time only that its teller lives; most of a log is such."""
        if self._own_views and self._first_view is None:
            self._first_view = when  # a view came before the servers were there, and a step has come after them
        life = self._lives.get(who)
        if life is None:
            self.feed({"t": when, "who": who, "kind": ""})
        else:
            if when > self.last:
                self.last = when
            if life.end is None and when > life.last:
                life.last = when

    def feed(self, event: Mapping[str, Any]) -> None:
        try:
            self._feed(event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            pass

    def _feed(self, event: Mapping[str, Any]) -> None:
        when, who, kind = float(event["t"]), str(event["who"]), event["kind"]
        self.last = max(self.last, when)
        if kind == "view" and event.get("own"):
            self._own_views = True
        elif kind == "view" and self._first_view is None:
            self._first_view = when
        if kind in _STRENGTH:
            self._strength.feed(event, when)
        if kind == "worker_started":
            self._began(str(event["worker"]), when)
        elif kind == "worker_exited":
            self._ended(str(event["worker"]), when, str(event.get("reason")))
        elif kind == "agent_stopped":  # in order: nobody is to be replaced any more
            for place in tuple(self._empty):
                self._filled(place, when)
        if not is_worker(who):
            return
        life = self._lives.get(who) or self._began(who, when)
        if life.end is None:
            life.last = max(life.last, when)
            if kind == "spent":
                self._told(life, event, when)
            elif kind == "registered" and life.idle_s is None:
                life.idle_s = self._strength.full_s(when) - life.full_s

    def _began(self, worker: str, when: float) -> _Life:
        self._filled(_place(worker), when)
        self._forget_some()
        return self._lives.setdefault(worker, _Life(when, when, self._strength.full_s(when)))

    def _filled(self, place: str, when: float) -> None:
        if place in self._empty:
            _add(self._past, self._down(*self._empty.pop(place), when))

    def _down(self, since: float, full_s: float, until: float) -> dict[str, float]:
        empty_s = max(0.0, until - since)
        idle_s = min(empty_s, self._strength.full_s(until) - full_s)
        return {DOWN: empty_s - idle_s, STANDBY: idle_s}

    def _told(self, life: _Life, event: Mapping[str, Any], when: float) -> None:
        seconds = {name: float(spent) for name, spent in event["seconds"].items() if name in OWN}
        if all(0.0 <= spent < math.inf for spent in seconds.values()):
            life.told, life.seconds, self.told = when, seconds, True
            life.doing = event["doing"] if event["doing"] in OWN else JOINING

    def _ended(self, worker: str, when: float, reason: str) -> None:
        life = self._lives.get(worker)
        if life is None or life.end is not None:
            return
        # Nobody saw it die: it lived as long as it was heard of.
        life.end = life.last if reason == "died while no agent ran" else max(when, life.last)
        if life.idle_s is None:
            life.idle_s = self._strength.full_s(when) - life.full_s
        if reason in _REPLACED:
            self._empty[_place(worker)] = life.end, self._strength.full_s(when)

    def _forget_some(self) -> None:
        if len(self._lives) >= WORKERS_KEPT:
            ended = [worker for worker, life in self._lives.items() if life.end is not None]
            for worker in ended[: WORKERS_KEPT // 2]:
                _add(self._past, self._spent(self._lives.pop(worker), 0.0))

    # ---- what it comes to

    def workers(self, now: float | None = None, alive: Collection[str] | None = None) -> dict[str, Spent]:
        """Each worker's time until `now`, or until the last event. Of those that have not ended, only `alive` ones live
        until then, where that is known; the others have ended when they were last heard of."""
        until = self.last if now is None else max(now, self.last)
        ends = {
            worker: until if alive is None or worker in alive else life.last for worker, life in self._lives.items()
        }
        return {worker: Spent(self._spent(life, ends[worker])) for worker, life in self._lives.items()}

    def run(self, now: float | None = None, alive: Collection[str] | None = None) -> Spent:
        """The sum over all workers, and over slots while they were empty."""
        until = self.last if now is None else max(now, self.last)
        total = dict(self._past)
        for spent in self.workers(until, alive).values():
            _add(total, spent.seconds)
        for since, full_s in self._empty.values():
            _add(total, self._down(since, full_s, until))
        return Spent(total)

    def _spent(self, life: _Life, until: float) -> dict[str, float]:
        """Adds up to the life's length, by its own clock where the two disagree."""
        total = _nothing()
        end = until if life.end is None else life.end
        if life.told is None:
            total[JOINING] += max(0.0, end - life.start)
        else:
            _add(total, life.seconds)
            total[JOINING] += max(0.0, life.told - life.start - math.fsum(life.seconds.values()))
            total[life.doing] += max(0.0, end - life.told)
        started = end if self._first_view is None else min(end, self._first_view)
        starting_s = min(max(0.0, started - life.start), total[JOINING])
        total[JOINING] -= starting_s
        total[STARTING] += starting_s
        idle_s = self._strength.full_s(end) - life.full_s if life.idle_s is None else life.idle_s
        idle_s = min(max(0.0, idle_s), total[JOINING])
        total[JOINING] -= idle_s
        total[STANDBY] += idle_s
        return total


class _Strength:
    """For how long the run has had all the members that it wants, on this host."""

    def __init__(self) -> None:
        self._wanted = math.inf
        self._view = 0
        self._members: set[str] = set()
        self._full_s = 0.0
        self._since: float | None = None

    def full_s(self, now: float) -> float:
        return self._full_s + (max(0.0, now - self._since) if self._since is not None else 0.0)

    def feed(self, event: Mapping[str, Any], now: float) -> None:
        kind = event["kind"]
        if kind in ("agent_started", "scaled"):
            self._wanted = int(event["workers"])
        elif kind == "view" and event.get("own"):
            self._members.add(str(event["who"]))
        elif kind == "view" and int(event["view"]) > self._view:
            self._view = int(event["view"])
            here = host_of(str(event["who"]))
            self._members = {str(member) for member in event["members"] if host_of(str(member)) == here}
        elif kind == "worker_exited":
            self._members.discard(str(event["worker"]))
        else:
            return
        self._full_s = self.full_s(now)
        self._since = now if len(self._members) >= self._wanted else None


def _nothing() -> dict[str, float]:
    return dict.fromkeys(CATEGORIES, 0.0)


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for category, spent in seconds.items():
        total[category] += spent


def _place(worker: str) -> str:
    return f"{slot_of(worker)}@{host_of(worker)}"
