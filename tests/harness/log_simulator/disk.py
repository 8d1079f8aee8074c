"""What a replica has stored: in its process's memory, or on a disk that confirms later and survives the process."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.log.messages import Entry, Promise, Rebase, Snapshot, Store, Stored, Update, Write


@dataclass(slots=True)
class Disk:
    """`pending`: handed over and not confirmed. After a crash some of it may be there, in order, and the rest not."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    totals: dict[int, int] = field(default_factory=lambda: {0: 0})  # the states of the snapshots that are held
    entries: list[Entry] = field(default_factory=list)
    promised: int = 0
    pending: list[Store] = field(default_factory=list)
    ever: dict[int, Entry] = field(default_factory=dict)  # the newest entry that was stored for each index
    before: Disk | None = None  # what was deleted when the server was a replica no more

    def carry_out(self, count: int) -> None:
        for store in self.pending[:count]:
            operation = store.operation
            if isinstance(operation, Write):
                first = operation.entries[0].index
                self.entries = [entry for entry in self.entries if entry.index < first]
                assert not self.entries or self.entries[-1].index == first - 1, (self.entries[-1], first)
                self.entries += operation.entries
                self.ever.update((entry.index, entry) for entry in operation.entries)
            elif isinstance(operation, Promise):
                self.promised = max(self.promised, operation.epoch)
            else:
                assert isinstance(operation, Rebase)
                self.entries = []
        del self.pending[:count]

    def hold(self, snapshot: Snapshot, total: int) -> None:
        if snapshot.end.index > self.snapshot.end.index:
            self.snapshot = snapshot
        self.totals[snapshot.end.index] = total

    def drop_through(self, index: int) -> None:
        self.entries = [entry for entry in self.entries if entry.index > index]

    def found(self) -> Stored:
        return Stored(self.snapshot, tuple(self.entries), self.promised)

    def had(self, index: int, update: Update) -> bool:
        """It was stored here, alone or in a snapshot, whatever became of it since."""
        entry = self.ever.get(index)
        has = self.snapshot.end.index >= index or (entry is not None and entry.content == update)
        return has or (self.before is not None and self.before.had(index, update))
