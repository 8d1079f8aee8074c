"""holdfast.tables.publish: a table's rows into a log in storage, base and deltas, from which it comes back to the bit.

One writer at a time: an entry's number is taken by create, and who finds it taken is told so; if it writes once more,
it is the writer from then on, and begins with a base. A write is whole or not there; after one that failed, the next
looks which it was. The first write of a publisher is a base, unless it restored the table from this log itself, since
only then is it known what changed since the last entry.

Owned by one thread, like the table.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, StorageRefused
from holdfast.tables.log_format import (
    Part,
    TableLogEntry,
    check_settings,
    checksum_of,
    entry_name,
    newest_chain,
    parts_of,
    place_of,
    read_entry,
    read_pieces,
    sequences,
)
from holdfast.tables.module import EmbeddingTable
from holdfast.tables.shard import Changes, TableShard
from holdfast.tables.stores import TableStore

DELTAS_MAX = 256  # after a base
BASES_KEPT = 2  # a follower that reads the older one is not left without it


def publish(table: EmbeddingTable, uri: str) -> Publisher:
    """A log of this table at `uri`: a directory, s3://…, hdfs://…. Nothing is written before `write`."""
    return Publisher(table.store, open_storage(uri))


@dataclass
class _ShardLog:
    """What this publisher knows of one shard's log."""

    place: str
    next: int = 0  # the number of the next entry
    last: TableLogEntry | None = None  # the one before it, if this publisher knows it
    followed: bool = False  # whether the store's changes since that entry are what comes next
    base_bytes: int = 0
    delta_bytes: int = 0
    deltas: int = 0
    wrote: bool = False  # this publisher wrote the last entry
    sent: TableLogEntry | None = None  # an entry of which it is not known whether it is there

    def committed(self, entry: TableLogEntry) -> None:
        self.next, self.last, self.followed, self.sent = entry.sequence + 1, entry, True, None
        if entry.base:
            self.base_bytes, self.delta_bytes, self.deltas = entry.nbytes, 0, 0
        else:
            self.delta_bytes, self.deltas = self.delta_bytes + entry.nbytes, self.deltas + 1

    def forget(self) -> None:
        """Nothing is known but that the next entry is a base."""
        self.last, self.followed, self.wrote, self.sent = None, False, False, None

    @property
    def wants_base(self) -> bool:
        """Whoever reads it all has to read no more than two bases' worth."""
        return not self.followed or self.deltas >= DELTAS_MAX or self.delta_bytes > self.base_bytes + (1 << 20)


@dataclass
class Publisher:
    store: TableStore
    storage: Storage
    _history: str = ""
    _logs: list[_ShardLog] = field(default_factory=list)

    def write(self) -> int:
        """Put what changed since the last time into the log; returns the bytes written. StorageError if it cannot be.

        An entry is written also where nothing changed: it tells followers how fresh they are.
        """
        self._open()
        if self._history != self.store.history:
            self._history = self.store.history
            for log in self._logs:
                log.followed = False
        return sum(self._write(shard, log) for shard, log in enumerate(self._logs))

    def restore(self) -> bool:
        """Fill the table with what the log has. False: there is no log, and nothing is changed.

        IntegrityError, with nothing changed, if the log has a gap or is damaged.
        """
        self._open()
        chains = [newest_chain(self.storage, log.place) for log in self._logs]
        if not all(chains):
            return False
        self.store.restore([replayed(self.storage, chain, self.store).changes() for chain in chains])
        if any(self.store.updates(shard) != chain[-1].moment.updates for shard, chain in enumerate(chains)):
            return True  # the servers' rows were further: the next entry is a base
        self._history = self.store.history
        for log, chain in zip(self._logs, chains, strict=True):
            for entry in chain:
                log.committed(entry)
        return True

    def close(self) -> None:
        self.storage.close()

    def _open(self) -> None:
        if self._logs:
            return
        shards = self.store.shards
        others = {name for stored in self.storage.list() if "-of-" in (name := stored.name.partition("/")[0])}
        wrong = others - {place_of(shard, shards) for shard in range(shards)}
        if wrong:
            raise ConfigError(
                f"{self.storage.uri} has the log {min(wrong)}, and this table has {shards} shards",
                hint="publish to another place, or remove that log",
            )
        self._logs = [_ShardLog(place_of(shard, shards)) for shard in range(shards)]

    def _write(self, shard: int, log: _ShardLog) -> int:
        self._catch_up(log)
        base = log.wants_base
        since = log.last.moment.updates if log.last is not None and not base else 0
        if not base and self.store.updates(shard) < since:
            base, since = True, 0
        at_ms = int(time.time() * 1000)
        changes = self.store.changes(shard, since)
        sequence = log.next
        entry = TableLogEntry(
            sequence,
            base,
            since,
            replace(changes.moment, units=()),  # they are of this run's data
            self.store.settings,
            at_ms,
            "" if base or log.last is None else log.last.checksum,
            tuple(self._written(log.place, sequence, changes)),
        )
        content = entry.encode()
        entry = TableLogEntry.decode(content, "what is written")
        log.sent = entry
        if self.storage.create(entry_name(log.place, sequence), content):
            log.committed(entry)
            log.wrote = True
        else:
            self._catch_up(log)  # it may be this one: a storage tries again by itself
        if base:
            self._remove_old(log)
        return entry.nbytes + len(content)

    def _written(self, place: str, sequence: int, changes: Changes) -> list[Part]:
        token = secrets.token_hex(8)
        parts: list[Part] = []
        for number, (kind, content) in enumerate(parts_of(changes)):
            name = f"{place}/data/{sequence:012d}-{token}-{number:04d}"
            self.storage.write(name, content)
            parts.append(Part(kind, name, content.nbytes, checksum_of(content)))
        return parts

    def _catch_up(self, log: _ShardLog) -> None:
        """Which entry is the newest, at the beginning and after a write that failed."""
        if log.sent is not None:
            try:
                there = read_entry(self.storage, log.place, log.sent.sequence)
            except NotStored:
                log.sent = None
                return
            if there.checksum != log.sent.checksum:
                log.forget()
                raise StorageRefused(
                    f"another process writes the log {log.place} at {self.storage.uri}",
                    hint="let one process publish a table; if the other one is gone, write again",
                )
            log.committed(there)
            log.wrote = True
        elif not log.wrote:
            numbers = sequences(self.storage, log.place)
            log.next = numbers[-1] + 1 if numbers else 0
            if log.last is None or log.last.sequence + 1 != log.next:  # others have written since it was restored
                log.forget()

    def _remove_old(self, log: _ShardLog) -> None:
        """What is older than the last two bases: entries first, oldest first, so that no gap ever shows."""
        bases = 0
        numbers = sequences(self.storage, log.place)
        for sequence in reversed(numbers):
            try:
                bases += read_entry(self.storage, log.place, sequence).base
            except (NotStored, IntegrityError):
                continue  # damaged ones go with the old
            if bases == BASES_KEPT:
                oldest = sequence
                break
        else:
            return
        for sequence in numbers:
            if sequence < oldest:
                self.storage.delete(entry_name(log.place, sequence))
        first = f"{log.place}/data/{oldest:012d}"
        for stored in self.storage.list(f"{log.place}/data/"):
            if stored.name < first:
                self.storage.delete(stored.name)


def replayed(storage: Storage, chain: list[TableLogEntry], like: TableStore) -> TableShard:
    """A shard from a base and its deltas."""
    shard = TableShard(like.settings)
    for entry in chain:
        check_settings(entry, like.settings)
        for piece in read_pieces(storage, entry):
            shard.apply_changes(piece)
    return shard
