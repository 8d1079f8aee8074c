"""What the events tell of parameter servers: who lives, who leads which slice, how often slices had to find another
primary, how long logs are, how stale updates were. Pure: a part of the fold (fold.py).

Servers have lanes as workers do, by slot. A slice's lane says who led it when, and where nobody did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from holdfast.core.words import host_of
from holdfast.observe.lanes import DEAD, GONE, JOINING, RECOVERING, SERVING, SLOW, Lane

STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)
SERVERS_KEPT_MAX = 256  # those that have ended included
LANES_MAX = 64  # of servers: a host has a few
SLICES_MAX = 256
SLICE_LANES_MAX = 64
STALENESS_MAX = 10_000  # a staleness beyond counts as so much
_ENDED_IN_ORDER = ("ended", "started over")


@dataclass
class ServerRecord:
    """As its agent and itself have last told. `lags_s`: how long it finds that others take."""

    alive: bool = True
    pid: int | None = None
    slow: float | None = None  # times as long as the others
    leads: int = 0
    slices: int = 0
    entries: int = 0
    log_bytes: int = 0
    updates: int = 0
    lags_s: dict[str, float] = field(default_factory=dict)


@dataclass
class SliceRecord:
    primary: str
    servers: tuple[str, ...] = ()
    epoch: int = 0
    failovers: int = 0


class Servers:
    def __init__(self) -> None:
        self.alive: set[str] = set()  # of this host, as far as its agent tells
        self.lost = 0
        self.failovers = 0
        self.moves = 0
        self.staleness: Counter[int] = Counter()  # by how many updates of others -> updates
        self.known: dict[str, ServerRecord] = {}
        self.slices: dict[str, SliceRecord] = {}
        self.lanes: dict[str, Lane] = {}
        self.slice_lanes: dict[str, Lane] = {}
        self.updates_ended = 0  # acknowledged by servers that are forgotten
        self.changed = 0

    # ---- the processes

    def on_agent_started(self, event: Mapping[str, Any], at: float, number: int) -> None:
        if not event.get("took_over"):
            for server in tuple(self.alive):
                self._end(server, GONE, at, number)
            for lane in self.slice_lanes.values():
                lane.move(GONE, "", at, number)
            self.slices.clear()

    def on_server_started(self, event: Mapping[str, Any], at: float, number: int) -> None:
        server = str(event["server"])
        self.alive.add(server)
        known = self._server(server)
        known.pid, known.alive = event.get("pid"), True
        self._lane(server).move(JOINING, server, at, number)
        self.changed = number

    def on_server_exited(self, event: Mapping[str, Any], at: float, number: int) -> None:
        server, reason = str(event["server"]), event.get("reason")
        self.lost += reason not in _ENDED_IN_ORDER
        self._end(server, GONE if reason in _ENDED_IN_ORDER else DEAD, at, number)
        for name, one in self.slices.items():
            if one.primary == server and name in self.slice_lanes:
                self.slice_lanes[name].move(RECOVERING, "no primary", at, number)

    def on_agent_stopped(self, event: Mapping[str, Any], at: float, number: int) -> None:
        """Its servers end with it."""
        for server in tuple(self.alive):
            self._end(server, GONE, at, number)
        for lane in self.slice_lanes.values():
            lane.move(GONE, "", at, number)

    def _end(self, server: str, state: str, at: float, number: int) -> None:
        self.alive.discard(server)
        if server in self.known:
            self.known[server].alive = False
            self.known[server].leads = self.known[server].entries = self.known[server].log_bytes = 0
        self._lane(server).move(state, server, at, number)
        self.changed = number

    def on_serving(self, event: Mapping[str, Any], at: float, number: int) -> None:
        server = str(event["who"])
        known = self._server(server)
        known.slices, known.leads = len(event["slices"]), int(event["leads"])
        known.entries, known.log_bytes = int(event["entries"]), int(event["log_bytes"])
        known.updates = int(event["updates"])
        known.lags_s = {str(other): float(lag_s) for other, lag_s in event.get("lags_s", {}).items()}
        if known.alive:
            self._lane(server).move(SLOW if known.slow else SERVING, server, at, number)
        self.changed = number

    def on_server_slow(self, event: Mapping[str, Any], at: float, number: int) -> None:
        server = str(event["server"])
        self._server(server).slow = float(event.get("times") or 1.0)
        if server in self.alive:
            self._lane(server).move(SLOW, server, at, number)
        self.changed = number

    def on_server_no_longer_slow(self, event: Mapping[str, Any], at: float, number: int) -> None:
        server = str(event["server"])
        self._server(server).slow = None
        if server in self.alive:
            self._lane(server).move(SERVING, server, at, number)
        self.changed = number

    # ---- the slices

    def on_placed(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self._led(event, at, number).servers = tuple(map(str, event["servers"]))

    def on_failover(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.failovers += 1
        self._led(event, at, number).failovers += 1

    def _led(self, event: Mapping[str, Any], at: float, number: int) -> SliceRecord:
        name, primary, epoch = str(event["slice"]), str(event["primary"]), int(event["epoch"])
        if name not in self.slices and len(self.slices) >= SLICES_MAX:
            return SliceRecord(primary)
        known = self.slices.setdefault(name, SliceRecord(primary))
        known.primary, known.epoch, self.changed = primary, epoch, number
        if name not in self.slice_lanes and len(self.slice_lanes) < SLICE_LANES_MAX:
            self.slice_lanes[name] = Lane(name, (name.partition("/")[0], _number(name)), group="slices")
        if name in self.slice_lanes:
            self.slice_lanes[name].move(SERVING, f"{primary}, epoch {epoch}", at, number)
        return known

    def on_slice_moves(self, event: Mapping[str, Any], at: float, number: int) -> None:
        self.moves += 1

    def on_slices_lost(self, event: Mapping[str, Any], at: float, number: int) -> None:
        for name in event["slices"]:
            if (lane := self.slice_lanes.get(str(name))) is not None:
                lane.move(DEAD, "lost", at, number)
        self.slices.clear()
        self.changed = number

    # ---- updates

    def on_staleness(self, event: Mapping[str, Any], at: float, number: int) -> None:
        for stale, updates in dict(event["updates"]).items():
            self.staleness[min(int(stale), STALENESS_MAX)] += int(updates)

    @property
    def updates(self) -> int:
        """Acknowledged by this host's servers, those that were sent again included."""
        return self.updates_ended + sum(known.updates for known in self.known.values())

    def lag_s(self, server: str) -> float | None:
        """How long it takes to confirm, by what this host's servers that live have last measured."""
        found = [known.lags_s[server] for known in self.known.values() if known.alive and server in known.lags_s]
        return median(found) if found else None

    # ---- what is kept

    def _server(self, server: str) -> ServerRecord:
        if server not in self.known and len(self.known) >= SERVERS_KEPT_MAX:
            ended = next((name for name, known in self.known.items() if not known.alive), next(iter(self.known)))
            self.updates_ended += self.known.pop(ended).updates
        return self.known.setdefault(server, ServerRecord(alive=server in self.alive))

    def _lane(self, server: str) -> Lane:
        name = server_lane(server)
        lane = self.lanes.get(name) or Lane(name, (host_of(server), _number(name)), group="servers")
        if len(self.lanes) < LANES_MAX:
            self.lanes[name] = lane
        return lane


def server_lane(server: str) -> str:
    """The slot's name: `s0.3@alpha` is the third server of `s0@alpha`."""
    slot, _, host = server.partition("@")
    return f"{slot.partition('.')[0]}@{host}" if host else slot.partition(".")[0]


def _number(name: str) -> int:
    digits = name.partition("@")[0].rpartition("/")[2].lstrip("s")
    return int(digits) if digits.isdecimal() else 0
