"""A server's process: the shipped machine, what it has on disk, and what its effects do, one after the other.

A process may be killed between any two effects. What was kept before is there after a restart; what was to be sent
after it was never said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.byzantine.agreement import messages as m
from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.byzantine.agreement.machine import ServerMachine
from holdfast.byzantine.agreement.misbehaving import Misbehaving
from holdfast.byzantine.agreement.statements import Attest, Claim, Record

if TYPE_CHECKING:
    from tests.harness.agreement_simulator.world import World

TICK_S = 0.2
RECORDS_MAX = 2


class Disk:
    def __init__(self, model: bytes) -> None:
        self.ballot: m.Ballot | None = None
        self.records: list[Record] = []
        self.claims: list[Claim] = []
        self.blobs: dict[bytes, bytes] = {digest_of(model): model}

    def found(self) -> m.Stored:
        last = self.records[-1] if self.records else None
        return m.Stored(last, self.ballot, tuple(self.claims), frozenset(self.blobs))


def combine(parent: bytes, updates: list[bytes]) -> bytes:
    """The deterministic rule of this world."""
    return digest_of(pack((parent, tuple(updates))))


class Server:
    def __init__(self, world: World, name: str, liar: str) -> None:
        self.world = world
        self.name = name
        self.liar = liar  # the kind, or nothing if it is honest
        self.disk = Disk(world.first_model)
        self.alive = False
        self.stopped = False
        self.fuse: int | None = None  # after so many more effects the process is killed
        self.dies_before_vote = False
        self.restart_s = 0.0
        self.starts = 0
        self.machine: ServerMachine
        self._actor: ServerMachine | Misbehaving
        self._events: deque[m.Event] = deque()
        self._busy = False
        self.start()

    def __repr__(self) -> str:
        return f"{self.name}({self.liar})" if self.liar else self.name

    @property
    def rounds(self) -> int:
        return len(self.disk.records)

    def is_complete(self, rounds: int) -> bool:
        return self.rounds >= rounds and self.disk.records[rounds - 1].header.model in self.disk.blobs

    def start(self) -> None:
        world = self.world
        self.alive, self.stopped, self.fuse, self._busy = True, False, None, False
        self.starts += 1
        self._events.clear()
        self.machine = world.machine_class(
            self.name,
            world.checker,
            world.signers[self.name],
            world.schedule.timing,
            now=world.now,
            stored=self.disk.found(),
        )
        self._actor = Misbehaving(self.machine, self.liar, world.rng.random) if self.liar else self.machine
        started = self.starts

        def tick() -> None:
            if self.alive and self.starts == started:
                self.take(m.Tick())
                world.after(TICK_S, tick)

        world.after(world.rng.uniform(0, TICK_S), tick)

    def crash(self) -> None:
        if self.alive:
            self.world.trace(self, "is killed")
            self.alive = False
            self.world.after(self.restart_s, self.start)

    def take(self, event: m.Event) -> None:
        if not self.alive:
            return
        self._events.append(event)
        if self._busy or self.stopped:
            return
        self._busy = True
        while self._events and self.alive and not self.stopped:
            self._handle(self._events.popleft())
        self._busy = False

    def wake(self) -> None:
        self.stopped = False
        if self._events:
            self.take(self._events.pop())

    def _handle(self, event: m.Event) -> None:
        tracing = self.world.lines is not None
        if tracing:
            self.world.trace(self, "<", event)
        effects = self._actor.handle(event, self.world.now)
        for effect in effects:
            if self.dies_before_vote and isinstance(effect, m.Persist):
                self.dies_before_vote = False
                self.crash()
                return
            if self.fuse is not None:
                if self.fuse <= 0:
                    self.crash()
                    return
                self.fuse -= 1
            if tracing:
                self.world.trace(self, ">", effect)
            _PERFORM[type(effect)](self, effect)
        self._note_decision()

    def _note_decision(self) -> None:
        """After all effects: a process that was killed before its own vote was kept has decided nothing."""
        decided = self.machine.round.decided
        if decided is not None and not self.liar:
            self.world.books.decided(self, self.machine.round.number, decided.value.digest)
            if self.world.decider_trap:
                self.world.faults.decided(self)

    # -- effects

    def _persist(self, effect: m.Persist) -> None:
        self.disk.ballot = effect.ballot

    def _keep_update(self, effect: m.KeepUpdate) -> None:
        self.disk.claims.append(effect.claim)
        self.disk.blobs[effect.claim.digest] = effect.content

    def _keep_blob(self, effect: m.KeepBlob) -> None:
        self.disk.blobs[effect.digest] = effect.content

    def _append_record(self, effect: m.AppendRecord) -> None:
        self.disk.records.append(effect.record)
        self.disk.claims = [claim for claim in self.disk.claims if claim.round > effect.record.header.round]
        if not self.liar:
            self.world.books.appended(self, effect.record)

    def _forget(self, effect: m.Forget) -> None:
        for digest in effect.digests:
            self.disk.blobs.pop(digest, None)

    def _send(self, effect: m.Send) -> None:
        self.world.send(self.name, effect.peer, effect.message)

    def _broadcast(self, effect: m.Broadcast) -> None:
        if isinstance(effect.message, Attest) and not self.liar:
            self.world.books.attested(self, effect.message)
        for name in self.world.servers:
            if name != self.name:
                self.world.send(self.name, name, effect.message)

    def _send_records(self, effect: m.SendRecords) -> None:
        found = self.disk.records[effect.first - 1 : effect.first - 1 + RECORDS_MAX]
        if found:
            self.world.send(self.name, effect.peer, m.Records(tuple(found)))

    def _send_blob(self, effect: m.SendBlob) -> None:
        content = self.disk.blobs.get(effect.digest)
        if content is not None:
            self.world.send(self.name, effect.peer, m.Blob(content))

    def _aggregate(self, effect: m.Aggregate) -> None:
        updates = [self.disk.blobs[claim.digest] for claim in effect.entries]
        model = combine(self.disk.blobs[effect.parent_model], updates)
        started = self.starts

        def done() -> None:
            if self.alive and self.starts == started:
                self.disk.blobs[digest_of(model)] = model
                self.take(m.Aggregated(effect.round, digest_of(model)))

        self.world.after(self.world.rng.uniform(0.01, 0.1), done)

    def _tell(self, effect: m.Tell) -> None:
        assert effect.reason, effect


_PERFORM: dict[type, Callable[[Server, Any], None]] = {
    m.Persist: Server._persist,
    m.KeepUpdate: Server._keep_update,
    m.KeepBlob: Server._keep_blob,
    m.AppendRecord: Server._append_record,
    m.Forget: Server._forget,
    m.Send: Server._send,
    m.Broadcast: Server._broadcast,
    m.SendRecords: Server._send_records,
    m.SendBlob: Server._send_blob,
    m.Aggregate: Server._aggregate,
    m.Tell: Server._tell,
}
