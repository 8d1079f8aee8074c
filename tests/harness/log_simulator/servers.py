"""A server's process: the shipped machine of each slice, what it has stored, and the state that updates are applied to.

The state is a sum. Every update adds a bit of its own, so that the sum tells which updates are in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.log import messages as m
from tests.harness.log_simulator.disk import Disk

if TYPE_CHECKING:
    from tests.harness.log_simulator.world import World

TICK_S = 0.25
READ_LEDGER_S = 1.0


class Server:
    """`place` outlives its processes. `name` changes when what it stored is lost."""

    def __init__(self, world: World, place: str, rate: float) -> None:
        self.world = world
        self.place = place
        self.identity = 1
        self.starts = 0
        self.alive = False
        self.stopped = False  # the process stands still: it does nothing, and then goes on as if nothing had been
        self.cut_from_ledger = 0
        self.disk_full = 0
        self._rate = rate
        self._offset = world.rng.uniform(-1000, 1000)
        self.replicas: list[Replica] = []
        self._waiting: deque[tuple[Replica, m.Event]] = deque()
        self.start()

    @property
    def name(self) -> str:
        return f"{self.place}.{self.identity}"

    def clock(self) -> float:
        return self._offset + self._rate * self.world.now

    def start(self) -> None:
        self.alive, self.stopped = True, False
        self.starts += 1
        self.world.trace("start:", self.name)
        numbers = range(self.world.schedule.slices)
        self.replicas = [Replica(self, number, self.world.disk_of(self.name, number)) for number in numbers]
        self._every(TICK_S, self._tick)
        self._every(READ_LEDGER_S, self.read_ledger)
        self.world.after(0.001, self.read_ledger)

    def crash(self, *, loses_storage: bool) -> None:
        rng = self.world.rng
        self.alive = False
        self._waiting.clear()
        for replica in self.replicas:
            replica.disk.carry_out(rng.randint(0, len(replica.disk.pending)))
            replica.disk.pending.clear()
        if loses_storage or not self.world.schedule.durable:
            self.identity += 1

    def take(self, replica: Replica, event: m.Event) -> None:
        if not self.alive or replica not in self.replicas:
            return
        if self.stopped:
            self._waiting.append((replica, event))
        else:
            replica.handle(event)

    def wake(self) -> None:
        self.stopped = False
        while self.alive and not self.stopped and self._waiting:
            replica, event = self._waiting.popleft()
            replica.handle(event)

    def read_ledger(self) -> None:
        ledger = self.world.ledger
        if not self.alive or self.stopped:
            return
        for replica in self.replicas:
            self.take(replica, m.LedgerReached(ledger.reaches(self)))
        if not ledger.reaches(self):
            return
        for replica in self.replicas:
            configuration, revision = ledger.read(replica.number)
            self.take(replica, m.LedgerSaw(configuration, revision))

    def _tick(self) -> None:
        if not self.stopped:
            for replica in list(self.replicas):
                if replica.machine.is_left_over(self.clock()):
                    self.drop(replica)
                elif replica.machine.is_member or replica.machine.copy.store_failed_at is not None:
                    replica.handle(m.Tick())
                    if self.world.schedule.lonely and self.world.pressure.random() < 0.05:
                        replica.handle(m.CutLog())

    def drop(self, replica: Replica) -> None:
        """What it has of this slice is deleted; it may be added again, with nothing."""
        self.world.trace("drop:", replica)
        disk = self.world.new_disk(self.name, replica.number)
        self.replicas[replica.number] = Replica(self, replica.number, disk)

    def _every(self, period_s: float, act: Callable[[], None]) -> None:
        started = self.starts

        def again() -> None:
            if self.alive and self.starts == started:
                act()
                self.world.after(period_s, again)

        self.world.after(self.world.rng.uniform(0, period_s), again)


class Replica:
    """One slice's machine in one process, and what its effects do."""

    def __init__(self, server: Server, number: int, disk: Disk) -> None:
        self.server = server
        self.world = server.world
        self.number = number
        self.disk = disk
        found = disk.found()
        self.machine = self.world.machine_class(
            server.name, self.world.rules, now=server.clock(), start=server.starts, stored=found
        )
        self.applied = found.snapshot.end.index
        self.total = disk.totals[self.applied]
        self._events: deque[m.Event] = deque()
        self._busy = False
        self._is_retired = False

    def __repr__(self) -> str:
        return f"{self.server.name}/{self.number}"

    def handle(self, event: m.Event) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self.server.alive:
            event = self._events.popleft()
            if self.world.lines is not None:
                self.world.trace(self, "<", event)
            effects = self.machine.handle(event, self.server.clock())
            if self.machine.leading is not None:
                self.world.books.leads(self, self.machine.leading)
            for effect in effects:
                if self.world.lines is not None:
                    self.world.trace(self, ">", effect)
                getattr(self, f"_{type(effect).__name__.lower()}")(effect)
        self._busy = False
        if self._is_retired and self in self.server.replicas:
            self._is_retired = False
            if not self.machine.hears_primary:
                self.server.drop(self)

    def _later(self, delay_s: float, event: m.Event) -> None:
        self.world.after(delay_s, lambda: self.server.take(self, event))

    def _send(self, effect: m.Send) -> None:
        self.world.send(self.server, effect.peer, self.number, effect.message)

    def _store(self, effect: m.Store) -> None:
        self.disk.pending.append(effect)
        if not effect.durable:
            self._stored(effect)
        else:
            self.world.after(self.world.rng.uniform(0.001, 0.04), lambda: self._sync(effect))

    def _sync(self, effect: m.Store) -> None:
        """Everything that was handed over up to this effect: one sync for many."""
        if self.server.alive and self in self.server.replicas and effect in self.disk.pending:
            self._stored(effect)

    def _stored(self, effect: m.Store) -> None:
        if self.server.disk_full:
            failed = self.disk.pending[0].ticket
            self.disk.pending.clear()
            self._later(0.0, m.StoreFailed(failed, "the disk is full"))
            return
        self.disk.carry_out(self.disk.pending.index(effect) + 1)
        if effect.durable:
            self.server.take(self, m.Persisted(effect.ticket))
        else:
            self.handle(m.Persisted(effect.ticket))

    def _apply(self, effect: m.Apply) -> None:
        self.world.books.applied(self, effect.index, effect.update)
        self.applied, self.total = effect.index, self.total + int(effect.update.payload)

    def _forget(self, effect: m.Forget) -> None:
        assert effect.index > self.applied, effect

    def _acknowledge(self, effect: m.Acknowledge) -> None:
        self.world.books.acknowledges(self, effect.update, effect.index)
        self.world.answer(self, effect.client, effect)

    def _refuse(self, effect: m.Refuse) -> None:
        self.world.answer(self, effect.client, effect)

    def _serve(self, effect: m.Serve) -> None:
        self.world.answer(self, effect.client, effect, self.total)

    def _refuseread(self, effect: m.RefuseRead) -> None:
        self.world.answer(self, effect.client, effect)

    def _propose(self, effect: m.Propose) -> None:
        self.world.ledger.propose(self.server, self.number, effect)

    def _takesnapshot(self, effect: m.TakeSnapshot) -> None:
        total = self.total
        if not self.world.schedule.durable:  # in memory the state itself is the snapshot
            self.disk.hold(effect.snapshot, total)
            self.handle(m.SnapshotTaken(effect.snapshot))
            return

        def held() -> None:
            if self.server.alive and self in self.server.replicas:
                self.disk.hold(effect.snapshot, total)
                self.server.take(self, m.SnapshotTaken(effect.snapshot))

        if self.world.faulty and self.world.rng.random() < 0.1:
            self._later(0.1, m.SnapshotFailed(effect.snapshot, "drawn"))
        else:
            self.world.after(self.world.rng.uniform(0.01, 0.5), held)

    def _fetchsnapshot(self, effect: m.FetchSnapshot) -> None:
        self.world.after(self.world.rng.uniform(0.02, 0.4), lambda: self._fetch(effect))

    def _fetch(self, effect: m.FetchSnapshot) -> None:
        if not self.server.alive or self not in self.server.replicas:
            return
        source = self.world.disk_of(effect.peer, self.number)
        peer = self.world.named(effect.peer)
        index = effect.snapshot.end.index
        if peer is None or index not in source.totals or self.world.network.is_cut((peer.place, self.server.place)):
            self.server.take(self, m.SnapshotFailed(effect.snapshot, "the primary does not answer"))
            return
        snapshot, total = effect.snapshot, source.totals[index]
        if not self.world.schedule.durable:
            theirs = peer.replicas[self.number]
            if theirs.machine.copy.committed < index:
                self.server.take(self, m.SnapshotFailed(effect.snapshot, "that state is not there any more"))
                return
            snapshot, total = theirs.machine.copy.newest_snapshot(), theirs.total
        self.disk.hold(snapshot, total)
        self.server.take(self, m.SnapshotFetched(snapshot, effect.snapshot))

    def _restore(self, effect: m.Restore) -> None:
        self.applied = effect.snapshot.end.index
        self.total = self.disk.totals[self.applied]

    def _dropprefix(self, effect: m.DropPrefix) -> None:
        self.disk.drop_through(effect.through)

    def _retire(self, effect: m.Retire) -> None:
        self._is_retired = True

    def _tell(self, effect: m.Tell) -> None:
        assert effect.reason, effect
