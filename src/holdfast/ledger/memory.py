"""A ledger inside one process: for a run of one worker, and the twin that tests use in the place of a server.

A lock guards the machine. Leases that ran out end at the next call or when a waiting watch wakes for them, so no
thread is needed. It cannot tell that its own process was stopped: a run of one has nobody to be fenced from and
should grant itself a long lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.core.errors import LedgerUnavailable
from holdfast.ledger.machine import LedgerMachine, Record
from holdfast.ledger.port import Change
from holdfast.ledger.requests import RequestedLedger, perform
from holdfast.ledger.wire import Request


class MemoryLedger(RequestedLedger):
    """port.Ledger over a machine. Share one instance, or open several over one with `another`."""

    def __init__(self, machine: LedgerMachine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._machine = LedgerMachine() if machine is None else machine
        self._clock = clock
        self._changed = threading.Condition()  # guards the machine and says that it changed
        self._closed = False

    def another(self) -> MemoryLedger:
        """Another client of the same ledger."""
        twin = MemoryLedger(self._machine, self._clock)
        twin._changed = self._changed
        return twin

    def _ask(self, request: Request) -> Any:
        with self._changed:
            self._enter()
            return perform(self._machine, request, self._clock(), self._commit)

    def watch(self, prefix: str, *, revision: int) -> MemoryWatch:
        with self._changed:
            self._enter()
            return MemoryWatch(self, prefix, revision)

    def expire(self) -> None:
        """End what is overdue and wake the watches: for whoever moves a clock of their own."""
        with self._changed:
            while (record := self._machine.overdue(self._clock())) is not None:
                self._commit(record)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enter(self) -> None:
        if self._closed:
            raise LedgerUnavailable("this ledger is closed")
        self.expire()

    def _commit(self, record: Record) -> None:
        self._machine.commit(record, self._clock())
        self._changed.notify_all()

    def _changes(self, watch: MemoryWatch, timeout_s: float) -> tuple[Change, ...]:
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if watch.closed or self._closed:
                    raise LedgerUnavailable("this watch is closed")
                self.expire()
                changes = self._machine.changes_after(watch.revision, watch.prefix)
                watch.revision = self._machine.revision
                left_s = give_up - time.monotonic()
                if changes or left_s <= 0:
                    return changes
                # A deadline of the injected clock may never come by waiting; `expire` then wakes us.
                self._changed.wait(min(left_s, max(self._machine.next_deadline - self._clock(), 0.001)))


class MemoryWatch:
    """port.Watch on a MemoryLedger, for one thread; `close` may come from any."""

    def __init__(self, ledger: MemoryLedger, prefix: str, revision: int) -> None:
        self._ledger = ledger
        self.prefix = prefix
        self.revision = revision
        self.closed = False

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        return self._ledger._changes(self, timeout_s)

    def close(self) -> None:
        with self._ledger._changed:
            self.closed = True
            self._ledger._changed.notify_all()
