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
from holdfast.core.errors import HoldfastError, ProtocolError
from holdfast.core.options.run import REPLICAS
from holdfast.core.words import KEY_SERVERS, KEY_SLICE, KEY_SLICES, KEY_TARGETS, Registration, decode_json
from holdfast.ledger.port import Ledger
from holdfast.log.configuration import Configuration
from holdfast.servers.log_codec import decode_configuration
from holdfast.servers.placing import Target

LOST_S = 5.0  # without any replica: an agent that takes over hears of living servers sooner
SETTLE_S = 1.0  # after a change: a server that is replaced is back soon, and several may come at once


@dataclass(eq=False)
class SliceKeeper:
    _ledger: Ledger
    _tell: Callable[..., None]
    _refused: Callable[[HoldfastError], None]
    _replicas: int
    slices: dict[str, Configuration] = field(default_factory=dict)
    servers: dict[str, Registration] = field(default_factory=dict)
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
            else:
                return
            self._decide_at = now + SETTLE_S

    def _slice(self, name: str, value: bytes | None) -> None:
        was = self.slices.get(name)
        self._note(self.slices, name, value, lambda data: decode_configuration(decode_json(data)))
        now = self.slices.get(name)
        if was is not None and now is not None and now.primary != was.primary:
            self._tell("failover", slice=name, primary=now.primary, was=was.primary, epoch=now.epoch, reason=now.reason)

    def _note(self, known: dict[str, Any], name: str, value: bytes | None, decode: Callable[[bytes], Any]) -> None:
        if value is None:
            known.pop(name, None)
        else:
            known[name] = decode(value)

    def lost(self, now: float) -> list[str]:
        """Slices whose replicas are all gone, and whose state with them."""
        without = [name for name, one in self.slices.items() if not self.servers.keys() & set(one.replicas)]
        self._lost_since = {name: self._lost_since.get(name, now) for name in without}
        return sorted(name for name, since in self._lost_since.items() if now - since > LOST_S)

    def forget_slices(self) -> None:
        """Nobody has them any more: whoever comes next may create them anew."""
        keys = [KEY_SLICES]
        for prefix in (KEY_SLICE, KEY_TARGETS):
            attempt(lambda prefix=prefix: keys.extend(self._keys(prefix)), self._refused)  # type: ignore[misc]
        for key in keys:
            attempt(lambda key=key: self._ledger.delete(key), self._refused)  # type: ignore[misc]
        self.slices, self._targets, self._lost_since = {}, {}, {}

    def _keys(self, prefix: str) -> list[str]:
        return [entry.key for entry in self._ledger.read(prefix).entries]

    def look(self, now: float) -> None:
        if self._decide_at is None or now < self._decide_at:
            return
        self._decide_at = None
        hosts = {server: registration.host for server, registration in self.servers.items()}
        for move in decide(self.slices, self._targets, hosts, self._replicas or REPLICAS):
            if self._targets.get(move.slice) != move.target:
                self._targets[move.slice] = move.target
                self._put(move.slice, move.target)
                self._tell("slice_moves", slice=move.slice, servers=list(move.target.replicas), reason=move.reason)

    def _put(self, name: str, target: Target) -> None:
        attempt(lambda: self._ledger.put(KEY_TARGETS + name, target.encode()), self._refused)
