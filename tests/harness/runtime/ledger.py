"""The simulated ledger: the machine that ships (ledger/machine.py), behind lines that are slow, lossy and cut.

A request that arrives while it is away is lost. An answer may be lost, and then what was asked for is done. A new
leader gives every lease its full time again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.errors import LedgerUnavailable, WatchGap
from holdfast.core.words import KEY_DONE, KEY_VIEW, View
from holdfast.ledger.machine import LedgerMachine, Put, Record
from holdfast.ledger.port import Change, Entry, Reading
from tests.harness.runtime.kernel import Waiters

if TYPE_CHECKING:
    from tests.harness.runtime.process import Process
    from tests.harness.runtime.world import World

LEASE_S = 2.0
PATIENCE_S = 0.5  # until a client gives up on an answer
LOST = 0.02  # of all answers
Answer = TypeVar("Answer")


class LedgerService:
    def __init__(self, world: World) -> None:
        self._world = world
        self.machine = LedgerMachine()
        self.up = True
        self.forgotten = 0  # changes up to this revision are
        self.changed = Waiters(world.timeline)
        self._when_up: list[Callable[[], object]] = []

    def commit(self, record: Record | None) -> Record | None:
        if record is not None:
            if isinstance(record, Put) and record.key == KEY_VIEW:
                entry = self.machine.get(KEY_VIEW)
                old = View.decode(entry.value) if entry is not None else None
                self._world.books.check_view(old, View.decode(record.value))
            self.machine.commit(record, self._world.timeline.now)
            self._world.is_done |= isinstance(record, Put) and record.key == KEY_DONE
            self.changed.wake()
        return record

    def do(self, act: Callable[[], object]) -> None:
        """What an agent or a person puts there: as soon as the ledger is there."""
        if self.up:
            act()
        else:
            self._when_up.append(act)

    def put(self, key: str, value: bytes) -> None:
        self.do(lambda: self.commit(self.machine.put(key, value)))

    def delete(self, key: str) -> None:
        self.do(lambda: self.commit(self.machine.delete(key)))

    def end_leases(self) -> None:
        """Those that have run out."""
        while self.up and (record := self.machine.overdue(self._world.timeline.now)) is not None:
            self.commit(record)

    def go_down(self) -> None:
        self.up = False
        self._world.steadiness.ledger_goes_away()

    def come_up(self) -> None:
        self.up = True
        self.machine.renew_all(self._world.timeline.now)
        waiting, self._when_up = self._when_up, []
        for act in waiting:
            act()
        self.changed.wake()

    def forget(self) -> None:
        """Whoever has not read up to here must read everything anew."""
        self.forgotten = self.machine.revision


class LedgerLine:
    """One process's client (ledger/port.py)."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._service = world.ledger
        self._process = process
        self._rng = world.timeline.rng
        self.closed = False

    def get(self, key: str) -> Entry | None:
        return self._call(lambda: self._service.machine.get(key))

    def read(self, prefix: str) -> Reading:
        return self._call(lambda: self._service.machine.read(prefix))

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return self._call(lambda: self._done(self._service.machine.put(key, value, lease=lease))) or 0

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        machine = self._service.machine
        return self._call(
            lambda: self._done(machine.compare_and_set(key, value, expected=expected, lease=lease, while_at=while_at))
        )

    def delete(self, key: str) -> bool:
        return self._call(lambda: self._service.commit(self._service.machine.delete(key)) is not None)

    def grant(self, ttl_s: float) -> int:
        def grant() -> int:
            record = self._service.machine.grant(ttl_s)
            self._service.commit(record)
            return record.lease

        return self._call(grant)

    def keep_alive(self, lease: int) -> float:
        return self._call(lambda: self._service.machine.keep_alive(lease, self._world.timeline.now))

    def revoke(self, lease: int) -> None:
        self._call(lambda: self._service.commit(self._service.machine.revoke(lease)))

    def watch(self, prefix: str, *, revision: int) -> LedgerWatch:
        self._reach()
        return LedgerWatch(self, prefix, revision)

    def close(self) -> None:
        self.closed = True
        self._service.changed.wake()

    def _done(self, record: Put | None) -> int | None:
        self._service.commit(record)
        return record.revision if record is not None else None

    def is_cut(self) -> bool:
        return self.closed or not self._service.up or self._process.cut_from_ledger > 0

    def _reach(self) -> None:
        kernel = self._process.kernel
        kernel.sleep(self._world.network.delay())
        if self.is_cut():
            kernel.sleep(0.0 if self.closed else PATIENCE_S)
            raise LedgerUnavailable("the ledger does not answer")

    def _call(self, act: Callable[[], Answer]) -> Answer:
        self._reach()
        self._service.end_leases()
        answer = act()
        self._process.kernel.sleep(self._world.network.delay())
        if self.is_cut() or (self._world.is_lossy and self._rng.random() < LOST):
            self._process.kernel.sleep(PATIENCE_S)
            raise LedgerUnavailable("no answer came")
        return answer


class LedgerWatch:
    def __init__(self, line: LedgerLine, prefix: str, revision: int) -> None:
        self._line = line
        self._prefix = prefix
        self._revision = revision

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        line, service, kernel = self._line, self._line._service, self._line._process.kernel
        until = kernel.now() + timeout_s
        while True:
            if line.is_cut():
                raise LedgerUnavailable("the ledger does not answer")
            lagging_s = line._process.watch_lags_until - kernel.now()
            if lagging_s > 0:
                kernel.sleep(min(lagging_s, max(until - kernel.now(), 0.0)))
            elif self._revision < service.forgotten:
                raise WatchGap("too far behind")
            elif changes := service.machine.changes_after(self._revision, self._prefix):
                self._revision = service.machine.revision
                kernel.sleep(line._world.network.delay())
                return changes
            else:
                service.changed.wait(until - kernel.now())
            if kernel.now() >= until:
                return ()

    def close(self) -> None: ...
