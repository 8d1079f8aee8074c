"""Sees to it that slices are where they should be: hears of servers and slices, and writes targets into the ledger.

Every agent of a run does the same with the same ledger, and so they come to the same; a target that stands already is
not written again. Belongs to the agent's main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.agent.ledgers import attempt
from holdfast.agent.servers.moving import decide
from holdfast.agent.servers.slowness import Finding
from holdfast.core.errors import HoldfastError, ProtocolError
from holdfast.core.options.run import REPLICAS
from holdfast.core.words import (
    EVERY_START,
    KEY_DEAD_SERVERS,
    KEY_LEAVING,
    KEY_SERVERS,
    KEY_SLICE,
    KEY_SLICES,
    KEY_SLOW_SERVERS,
    KEY_STARTED_OVER,
    KEY_TARGETS,
    Registration,
    decode_json,
    decode_whole,
    encode_json,
)
from holdfast.ledger.port import Entry, Ledger
from holdfast.log.configuration import Configuration
from holdfast.placement.server_disks import slot_of
from holdfast.servers.log_codec import decode_configuration
from holdfast.servers.placing import Target

LOST_S = 5.0  # without a majority of living replicas: an agent that takes over hears of living servers sooner
SETTLE_S = 1.0  # after a change: a server that is replaced is back soon, and several may come at once
FORGET_S = 10.0  # the lease under which what is forgotten goes, should this agent end meanwhile


@dataclass(eq=False)
class SliceKeeper:
    _ledger: Ledger
    _tell: Callable[..., None]
    _refused: Callable[[HoldfastError], None]
    _replicas: int
    _host: str = ""
    _silent_s: float = 300.0  # so long servers whose end nobody has seen are waited for: they may only be cut off
    keeps: bool = False  # servers have their slices on disk, and come back with them
    slices: dict[str, Configuration] = field(default_factory=dict)
    servers: dict[str, Registration] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)  # servers, and which host's agent has found that
    started_over: int = 0  # how often slices were lost, and all began anew
    _leaving: set[str] = field(default_factory=set)
    _dead: set[str] = field(default_factory=set)  # servers whose end an agent has seen
    _given_up: set[str] = field(default_factory=set)  # of which somebody has said that they are gone for good
    _targets: dict[str, Target] = field(default_factory=dict)
    _decide_at: float | None = None
    _lost_since: dict[str, float] = field(default_factory=dict)

    def heard(self, key: str, value: bytes | None, now: float) -> None:
        """A key of the ledger has changed; None: it is gone."""
        with suppress(ProtocolError):
            if key.startswith(KEY_SERVERS):
                self._note(self.servers, key[len(KEY_SERVERS) :], value, Registration.decode)
            elif key.startswith(KEY_SLICE):
                self._slice(key[len(KEY_SLICE) :], value)
            elif key.startswith(KEY_TARGETS):
                self._note(self._targets, key[len(KEY_TARGETS) :], value, Target.decode)
            elif key.startswith(KEY_SLOW_SERVERS):
                self._slowed(key[len(KEY_SLOW_SERVERS) :], value)
            elif key.startswith(KEY_LEAVING):
                (self._leaving.discard if value is None else self._leaving.add)(key[len(KEY_LEAVING) :])
            elif key.startswith(KEY_DEAD_SERVERS):
                self._died(key[len(KEY_DEAD_SERVERS) :], value)
                return
            elif key == KEY_STARTED_OVER and value is not None:
                self.started_over = decode_whole(value, "number")
                return
            else:
                return
            self._decide_at = now + SETTLE_S

    def _died(self, server: str, value: bytes | None) -> None:
        (self._dead.discard if value is None else self._dead.add)(server)
        given_up = value is not None and decode_whole(value, "start") >= EVERY_START
        (self._given_up.add if given_up else self._given_up.discard)(server)

    def _slice(self, name: str, value: bytes | None) -> None:
        was = self.slices.get(name)
        self._note(self.slices, name, value, lambda data: decode_configuration(decode_json(data)))
        now = self.slices.get(name)
        if now is None or now == was:
            return
        if was is not None and now.primary != was.primary:
            self._tell("failover", slice=name, primary=now.primary, was=was.primary, epoch=now.epoch, reason=now.reason)
        if was is None or set(now.replicas) != set(was.replicas):
            servers = list(now.replicas)
            self._tell("placed", slice=name, primary=now.primary, servers=servers, epoch=now.epoch, reason=now.reason)

    def _slowed(self, server: str, value: bytes | None) -> None:
        was = self.slow.pop(server, None)
        if value is not None:
            found = decode_json(value)
            self.slow[server] = str(found.get("by", ""))
            if was is None:
                times, reason = found.get("times"), str(found.get("reason", ""))
                self._tell("server_slow", server=server, times=times, noticed_by=self.slow[server], reason=reason)
        elif was is not None:
            self._tell("server_no_longer_slow", server=server)

    def _note(self, known: dict[str, Any], name: str, value: bytes | None, decode: Callable[[bytes], Any]) -> None:
        if value is None:
            known.pop(name, None)
        else:
            known[name] = decode(value)

    # ---- slices that are lost

    def lost(self, now: float) -> list[str]:
        """Slices of which no majority of the replicas is left, nor can come back: what they had is gone with them.

        A server that had it in memory comes back under another name. One whose end nobody has seen may be cut off,
        and is waited for longer. One that had it on disk may come back at any time, unless its disk is gone too.
        """
        there = self.servers.keys() | self._may_come_back() if self.keeps else self.servers.keys()
        without = [name for name, one in self.slices.items() if not self._can_decide(one, there)]
        self._lost_since = {name: self._lost_since.get(name, now) for name in without}
        return sorted(name for name, since in self._lost_since.items() if now - since > self._patience_s(name))

    def _may_come_back(self) -> set[str]:
        """Replicas with a disk: all but those whose slot has another server, since the disk is gone, or given up."""
        replaced = {slot_of(server) for server in self.servers}
        named = {server for one in self.slices.values() for server in one.replicas}
        return {server for server in named - self._given_up if slot_of(server) not in replaced}

    def _can_decide(self, configuration: Configuration, there: Any) -> bool:
        return 2 * sum(server in there for server in configuration.replicas) > len(configuration.replicas)

    def _patience_s(self, name: str) -> float:
        if not self._host:
            return LOST_S  # all servers are processes of this host, which no network keeps from the ledger
        if self.keeps:
            return LOST_S  # only those are missed whose disk is gone
        configuration = self.slices[name]
        may_come = [server for server in configuration.replicas if server not in self._dead]
        return self._silent_s if self._can_decide(configuration, may_come) else LOST_S

    def start_over(self, step: int) -> None:
        """All agents, servers and workers hear of it and begin anew, with slices that are created from a checkpoint."""
        value = encode_json({"number": self.started_over + 1, "step": step})
        try:
            entry = self._ledger.get(KEY_STARTED_OVER)
            known = 0 if entry is None else decode_whole(entry.value, "number")
            if known > self.started_over:
                return  # another agent has begun with it; it will be heard of
            expected = 0 if entry is None else entry.revision
            if self._ledger.compare_and_set(KEY_STARTED_OVER, value, expected=expected) is None:
                return
        except HoldfastError as error:
            self._refused(error)
            return
        self.forget_slices()

    def forget_slices(self) -> None:
        """Nobody has them any more: whoever comes next may create them anew."""
        attempt(self._forget_slices, self._refused)
        self.slices, self._targets, self._lost_since = {}, {}, {}

    def _forget_slices(self) -> None:
        """All at once and only what is there now: what is created in the meantime stays."""
        entries = [entry for prefix in (KEY_SLICE, KEY_TARGETS) for entry in self._ledger.read(prefix).entries]
        plan = self._ledger.get(KEY_SLICES)
        entries += [plan] if plan is not None else []
        if not entries:
            return
        lease = self._ledger.grant(FORGET_S)
        for entry in entries:
            self._doom(entry, lease)
        self._ledger.revoke(lease)

    def _doom(self, entry: Entry, lease: int) -> None:
        self._ledger.compare_and_set(entry.key, entry.value, expected=entry.revision, lease=lease)

    # ---- where they should be

    def look(self, now: float) -> None:
        if self._decide_at is None or now < self._decide_at:
            return
        self._decide_at = None
        hosts = {server: registration.host for server, registration in self.servers.items()}
        moves = decide(
            self.slices,
            self._targets,
            hosts,
            self._replicas or REPLICAS,
            leaving=self._leaving & hosts.keys(),
            slow=self.slow.keys() & hosts.keys(),
        )
        for move in moves:
            if self._targets.get(move.slice) != move.target:
                self._targets[move.slice] = move.target
                self._put(move.slice, move.target)
                primary = {"primary": move.target.primary} if move.target.primary else {}
                servers = list(move.target.replicas)
                self._tell("slice_moves", slice=move.slice, servers=servers, reason=move.reason, **primary)

    def _put(self, name: str, target: Target) -> None:
        attempt(lambda: self._ledger.put(KEY_TARGETS + name, target.encode()), self._refused)

    def found(self, finding: Finding) -> None:
        """This host's servers have measured that a server is slow, or is not any more."""
        key = KEY_SLOW_SERVERS + finding.server
        if finding.slow and finding.server not in self.slow:
            value = encode_json({"by": self._host, "times": finding.times, "reason": finding.reason})
            attempt(lambda: self._ledger.put(key, value), self._refused)
        elif not finding.slow and self.slow.get(finding.server) == self._host:
            attempt(lambda: self._ledger.delete(key), self._refused)

    def has_slices_on(self, servers: list[str]) -> bool:
        """Whether some slice is still on one of these, and there are others that could have it."""
        staying = self.servers.keys() - self._leaving - set(servers)
        return bool(staying) and any(set(one.replicas) & set(servers) for one in self.slices.values())
