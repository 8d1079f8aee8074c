"""One replica's copy of a slice's log: what it has, what of that is stored, committed and applied.

It owns the entries, the table of updates that are in the log, the snapshot that covers the entries before them, and the
tickets of what is being stored. What is committed is applied at once, so there is one number for both.

Invariants: a committed entry is never cut off; an update is applied once; entries are dropped only behind a snapshot
that is held as durably as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.core.errors import IntegrityError
from holdfast.log.configuration import LogEnd
from holdfast.log.deduplication import Deduplication
from holdfast.log.messages import (
    Apply,
    DropPrefix,
    Effect,
    Entry,
    Forget,
    Forgotten,
    Promise,
    Rebase,
    Restore,
    Snapshot,
    Store,
    Stored,
    TakeSnapshot,
    Update,
    Write,
)
from holdfast.log.rules import Rules
from holdfast.log.tail import Tail


class LogCopy:
    def __init__(self, rules: Rules, stored: Stored) -> None:
        self._rules = rules
        self.snapshot = stored.snapshot
        self.tail = _tail_behind(stored)
        self.committed = stored.snapshot.end.index
        self.persisted = self.tail.end.index  # entries up to here are stored as durably as promised
        self.table = Deduplication(rules.sequence_window, stored.snapshot.remembered)
        self.promised = self.promise_persisted = stored.promised
        self._ticket = 0
        self._marks: deque[tuple[int, int]] = deque()  # ticket -> the index that is persisted with it
        self._promises: deque[tuple[int, int]] = deque()
        self._rebasing: tuple[int, LogEnd] | None = None  # the ticket of a log that begins anew, until it is stored
        self._taking = False
        self._cut_to = 0  # up to here nothing is kept for those who are late
        self.store_failed_at: float | None = None  # then what is not persisted has to be stored again
        if not self._follows_on_the_snapshot(stored):
            # It ended after the snapshot had come and before the log was begun anew: that is made up for first.
            self._rebasing, self.store_failed_at = (0, stored.snapshot.end), 0.0

    @staticmethod
    def _follows_on_the_snapshot(stored: Stored) -> bool:
        """The stored log reaches the snapshot's end, and agrees with it there."""
        end, entries = stored.snapshot.end, stored.entries
        if not entries:
            return end.index == 0
        if entries[0].index == end.index + 1:
            return True
        return any((entry.epoch, entry.index) == (end.epoch, end.index) for entry in entries)

    @property
    def end(self) -> LogEnd:
        return self.tail.end

    @property
    def persisted_end(self) -> LogEnd:
        epoch = self.tail.epoch_at(self.persisted)
        assert epoch is not None, (self.persisted, self.tail.base, self.end)
        return LogEnd(epoch, self.persisted)

    # -- storing

    def write(self, entries: Sequence[Entry]) -> list[Effect]:
        """Put entries behind what is there, in the place of whatever comes after."""
        if entries[0].index <= self.end.index:
            assert entries[0].index > self.committed, "what is committed is never cut off"
            self._cut_after(entries[0].index - 1)
        self.tail.append(entries)
        if self.store_failed_at is not None:
            return self.store_again()
        return [self._store(Write(tuple(entries)))]

    def store_again(self) -> list[Effect]:
        """Store everything that is not, after a failure."""
        self.store_failed_at = None
        effects: list[Effect] = []
        if self._rebasing is not None:
            effects = self._rebase(self._rebasing[1])
        entries = self.tail.after(self.persisted)
        return [*effects, self._store(Write(entries))] if entries else effects

    def promise(self, epoch: int) -> list[Effect]:
        self.promised = max(self.promised, epoch)
        if self._promises and self._promises[-1][1] >= epoch:
            return []  # on its way
        effects = self.store_again() if self.store_failed_at is not None else []
        store = self._store(Promise(self.promised))
        self._promises.append((store.ticket, self.promised))
        return [*effects, store]

    def stored(self, ticket: int) -> None:
        while self._marks and self._marks[0][0] <= ticket:
            self.persisted = self._marks.popleft()[1]
        if self._rebasing is not None and self._rebasing[0] <= ticket:
            self._rebasing = None
        while self._promises and self._promises[0][0] <= ticket:
            self.promise_persisted = max(self.promise_persisted, self._promises.popleft()[1])

    def not_stored(self, now: float) -> None:
        """What was confirmed to nobody is forgotten; what others have committed stays, and is stored again later."""
        self._marks.clear()
        self._promises.clear()
        self._cut_after(max(self.persisted, self.committed))
        self.store_failed_at = now

    def _store(self, operation: Write | Promise | Rebase) -> Store:
        self._ticket += 1
        self._marks.append((self._ticket, self.end.index))
        return Store(self._ticket, operation, self._rules.durable)

    def _cut_after(self, index: int) -> None:
        self.tail.cut_after(index)
        self.persisted = min(self.persisted, index)
        self._marks = deque((ticket, min(mark, index)) for ticket, mark in self._marks)

    # -- committing and applying

    def commit_to(self, index: int) -> list[Effect]:
        assert self.committed <= index <= self.end.index, (self.committed, index, self.end)
        effects: list[Effect] = []
        while self.committed < index:
            self.committed += 1
            content = self.tail.at(self.committed).content
            if isinstance(content, Update):
                self.table.record(content, self.committed)
                effects.append(Apply(self.committed, content))
            elif isinstance(content, Forgotten):
                self.table.forget(content.worker, content.incarnation)
                effects.append(Forget(self.committed, content.worker, content.incarnation))
        return effects + self._snapshot_if_due()

    # -- snapshots

    def _snapshot_if_due(self) -> list[Effect]:
        since = self.snapshot.end.index
        is_long = self.committed - since >= self._rules.snapshot_every
        if self._taking or not (is_long or self.tail.nbytes(since + 1, self.committed) >= self._rules.snapshot_bytes):
            return []
        self._taking = True
        return [TakeSnapshot(self.newest_snapshot())]

    def newest_snapshot(self) -> Snapshot:
        """Of the state as it is now."""
        epoch = self.tail.epoch_at(self.committed)
        assert epoch is not None
        return Snapshot(LogEnd(epoch, self.committed), self.table.export())

    def snapshot_taken(self, snapshot: Snapshot) -> list[Effect]:
        """It is held as durably as the log is: what it covers can go, but for some entries for those who are late."""
        self._taking = False
        if snapshot.end.index <= self.snapshot.end.index:
            return []  # a newer one was fetched in the meantime
        self.snapshot = snapshot
        keep_from = snapshot.end.index + 1
        while keep_from > max(self.tail.base.index + 1, snapshot.end.index + 1 - self._rules.kept_behind):
            if self.tail.nbytes(keep_from - 1, snapshot.end.index) > self._rules.kept_behind_bytes:
                break
            keep_from -= 1
        return self._drop_through(min(max(keep_from - 1, min(self._cut_to, snapshot.end.index)), self.persisted))

    def cut_through(self, index: int) -> list[Effect]:
        """Drop entries up to this one, as soon as a snapshot covers them."""
        self._cut_to = max(self._cut_to, min(index, self.committed))
        if self.snapshot.end.index >= self._cut_to:
            return self._drop_through(min(self._cut_to, self.persisted))
        if self._taking:
            return []
        self._taking = True
        return [TakeSnapshot(self.newest_snapshot())]

    def snapshot_not_taken(self) -> None:
        self._taking = False

    def install(self, snapshot: Snapshot) -> list[Effect]:
        """Go on from a snapshot of another replica that is held here now."""
        assert snapshot.end.index > self.committed, (snapshot.end, self.committed)
        keeps = self.tail.epoch_at(snapshot.end.index) == snapshot.end.epoch
        self.snapshot, self.committed = snapshot, snapshot.end.index
        self.table = Deduplication(self._rules.sequence_window, snapshot.remembered)
        if keeps and self.persisted >= snapshot.end.index:
            return [Restore(snapshot), *self._drop_through(snapshot.end.index)]
        # Entries behind the snapshot that are not on disk yet are let go too: the primary has them.
        self.tail = Tail(snapshot.end)
        self.persisted = snapshot.end.index  # the snapshot is the copy of everything up to here
        self._marks = deque((ticket, snapshot.end.index) for ticket, _ in self._marks)
        self.store_failed_at = None
        return [Restore(snapshot), *self._rebase(snapshot.end)]

    def _rebase(self, end: LogEnd) -> list[Effect]:
        store = self._store(Rebase(end))
        # Entries that are here already are not part of it, and the snapshot holds what is before them.
        self._marks[-1] = (store.ticket, end.index)
        self._rebasing = (store.ticket, end)
        return [store]

    def _drop_through(self, index: int) -> list[Effect]:
        if index <= self.tail.base.index:
            return []
        self.tail.drop_through(index)
        return [DropPrefix(index)]


def _tail_behind(stored: Stored) -> Tail:
    """The entries that follow on the snapshot. Those that do not are of a log that the snapshot has replaced."""
    end, entries = stored.snapshot.end, stored.entries
    if entries and entries[0].index > end.index + 1:
        raise IntegrityError(
            f"the log begins at entry {entries[0].index} and the snapshot ends at {end.index}: what is between is lost",
            hint="the directory was changed by another program; remove it, and the server starts as a new replica",
        )
    covered = [entry for entry in entries if entry.index == end.index]
    if covered and covered[0].epoch != end.epoch:
        return Tail(end)
    return Tail(end, [entry for entry in entries if entry.index > end.index])
