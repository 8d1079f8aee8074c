"""Clients: each sends its update of a round to the servers, waits for a model that f+1 of them signed, and goes on.

honest     one update a round, to all servers, again and again until the round is over
absent     never sends any
twofold    signs two updates a round, and tells servers different ones
partial    sends its update to one or two servers only
replaying  sends its first update in every round
stranger   signs with a key that is not registered
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.byzantine.agreement.statements import Claim

if TYPE_CHECKING:
    from tests.harness.agreement_simulator.world import World

AGAIN_S = 0.7


class Client:
    def __init__(self, world: World, name: str, kind: str) -> None:
        self.world = world
        self.name = name
        self.kind = kind
        self.round = 1  # the round whose model it waits for
        self._model = digest_of(world.first_model)
        self._record: bytes | None = None  # digest of a model that it accepts and has no bytes of
        self._first: tuple[Claim, bytes] | None = None
        self._accepted: set[str] = set()
        world.after(world.rng.uniform(0, 0.1), self._act)

    @property
    def is_done(self) -> bool:
        return self.round > self.world.schedule.rounds or self.kind == "stranger"

    def _act(self) -> None:
        """Send and ask again, until the last round is over."""
        if self.is_done and self.kind != "stranger":
            return
        if self.world.is_over:
            return
        for place, server in enumerate(self.world.servers):
            spared = self.kind == "absent" or (self.kind == "partial" and place > self.round % 2)
            if not spared and server not in self._accepted:
                claim, content = self._update(place)
                self.world.send(self.name, server, m.Submit(claim, content))
            if self._record is not None:
                self.world.send(self.name, server, m.Want(self._record))
            else:
                self.world.send(self.name, server, m.Ask(self.round))
        self.world.after(AGAIN_S * self.world.rng.uniform(0.8, 1.2), self._act)

    def _update(self, place: int) -> tuple[Claim, bytes]:
        if self.kind == "replaying" and self._first is not None:
            return self._first
        which = place % 2 if self.kind == "twofold" else 0
        content = pack((self.name, self.round, self._model, which))
        claim = Claim(self.name, self.round, digest_of(content))
        claim = Claim(
            self.name,
            self.round,
            claim.digest,
            self.world.signers[self.name](self.world.checker.said(claim.said)),
        )
        self.world.books.signed(claim, content)
        self._first = (claim, content)
        return claim, content

    def take(self, server: str, message: m.Message) -> None:
        if self.is_done:
            return
        if isinstance(message, m.Accepted) and message.round == self.round:
            self._accepted.add(server)
        elif isinstance(message, m.Records) and self._record is None:
            for record in message.records:
                if record.header.round == self.round and not self.world.checker.results(record):
                    self.world.books.accepted(self, record)
                    self._record = record.header.model
                    break
        elif isinstance(message, m.Blob) and digest_of(message.content) == self._record:
            self._model, self._record = self._record, None
            self.round += 1
            self._accepted.clear()
