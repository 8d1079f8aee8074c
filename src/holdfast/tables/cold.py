"""Rows that are used least, on a disk of this host: the tier below memory.

An SQLite file of the standard library holds records by id; a mark of each stays in memory, so that an id that has no
row on the disk costs no read. A row on the disk is read where it lies, and comes back into memory when it is updated.
Where a row lies is no part of a shard's state: replicas need not agree on it, and a restart begins with an empty file.

The file is this process's alone and is not made to survive it: nothing waits for the disk, and a crash costs nothing,
since the shard comes back from a replica or from its log. What the disk has no room for stays in memory.
SQLite rather than LMDB: it takes less room on the disk, is about as fast (benchmarks/cold_rows.py), and it is there
with Python.

Owned by the shard's thread.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import ConfigError, StorageUnavailable
from holdfast.tables.horizon import Horizon, below
from holdfast.tables.rows.choosing import kernels
from holdfast.tables.rows.port import HEADER_WORDS, USES_BITS, Ids, Layout, Records, Rows, Values, ids_of, marks_of

CACHE_KIB = 16 * 1024
QUERY_IDS = 500  # asked for at once
MOVED_PART = 8  # of the rows in memory, so much goes to the disk at a time, in small tables;
MOVED_ROWS_MAX = 1 << 14  # in large ones so many, or twice as many as came: the shard's thread must not stand still
LOOKED_AT_MAX = 1 << 17  # rows that are gone through at once for those that are used least,
SAMPLED = 1 << 12  # after so many have told how old that is
SPARE_BYTES = 32 << 20  # that stay free on the disk


class ColdTier:
    """The tier of a process that has several shards: they have `rows_in_memory` together, each as many.

    The directory is this process's alone: what an earlier one has left there goes.
    """

    def __init__(self, directory: Path, rows_in_memory: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory
        self._rows = rows_in_memory
        self._shards: weakref.WeakSet[ColdRows] = weakref.WeakSet()

    def begin(self) -> ColdRows:
        found = ColdRows(self._directory, max(MOVED_PART, self._rows), shared_by=lambda: len(self._shards))
        self._shards.add(found)
        return found


class ColdRows:
    """`rows_in_memory`: at most so many stay there after an update, in all the shards that share the tier; where it
    has become much less for each, because another shard has begun, or the disk had no room, after some updates."""

    def __init__(self, directory: Path, rows_in_memory: int, *, shared_by: Callable[[], int] = lambda: 1) -> None:
        if rows_in_memory < MOVED_PART:
            raise ConfigError(f"{rows_in_memory} rows in memory", hint=f"keep at least {MOVED_PART}, or all of them")
        self._rows_in_memory = rows_in_memory
        self._shared_by = shared_by
        self.marks = kernels().marks()
        self._hand = 0  # where among the rows in memory the next ones are looked for
        self._had = 0  # rows in memory, when the last update was done
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle, self._path = tempfile.mkstemp(dir=directory, prefix="cold-rows-", suffix=".sqlite3")
            os.close(handle)
            self._rows = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{directory} cannot hold the rows that are used least: {error}", hint="name a directory of this host"
            ) from error
        for setting in (
            "journal_mode=OFF",
            "synchronous=OFF",
            "locking_mode=EXCLUSIVE",
            f"cache_size=-{CACHE_KIB}",
            "temp_store=MEMORY",
        ):
            self._rows.execute(f"PRAGMA {setting}")
        self._rows.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, record BLOB NOT NULL)")
        weakref.finalize(self, Path(self._path).unlink, missing_ok=True)

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def memory_bytes(self) -> int:
        return self.marks.nbytes + 1024 * CACHE_KIB

    @property
    def disk_bytes(self) -> int:
        return Path(self._path).stat().st_size

    def look_up(self, ids: Ids, values: Values) -> None:
        """Put the values of those that are here where they belong."""
        here = np.flatnonzero(self.marks.get(ids)) if len(self) else ()
        if not len(here):
            return
        unique, which = np.unique(ids[here], return_inverse=True)
        body = self._read(unique).view(np.float32)[:, HEADER_WORDS : HEADER_WORDS + values.shape[1]]
        values[here] = body[which]

    def take(self, ids: Ids) -> Records:
        """The records of those that are here, which are not here any more. Ids, each once."""
        here = ids[self.marks.get(ids) > 0] if len(self) else ids[:0]
        records = self._read(here)
        self._delete(here)
        return records

    def fill(self, ids: Ids, wanted: npt.NDArray[np.bool_], block: Records) -> None:
        """The records of these ids, which are here, into the block. They stay."""
        if wanted.any():
            block[wanted] = self._read(ids[wanted])

    def newer(self, oldest: np.uint64, layout: Layout) -> Records:
        ids, marks = self.marks.all()
        wanted = np.sort(ids[marks >= oldest])
        return self._read(wanted) if len(wanted) else np.zeros((0, layout.words), dtype=np.uint32)

    def remove_below(self, horizon: Horizon) -> None:
        ids, marks = self.marks.all()
        self._delete(ids[below(ids, marks, horizon)])

    def relieve(self, rows: Rows) -> None:
        """If there are too many rows in memory, those go to the disk that were used longest ago."""
        most = max(MOVED_PART, self._rows_in_memory // max(1, self._shared_by()))
        if len(rows) <= most:
            self._had = len(rows)
            return
        wanted = len(rows) - most + most // MOVED_PART
        oldest = _oldest(rows.records(), wanted)
        left = min(wanted, max(MOVED_ROWS_MAX, 2 * (len(rows) - self._had)))
        for _ in range(len(rows) // LOOKED_AT_MAX + 2):
            if left <= 0:
                break
            moved = self._next_used_before(oldest, rows.records(), left)
            if not len(moved):
                continue
            if not self._has_room_for(2 * moved.nbytes):
                break
            self._write(moved)
            rows.remove(ids_of(moved))
            left -= len(moved)
        self._had = len(rows)

    def _next_used_before(self, oldest: np.uint64, records: Records, most: int) -> Records:
        """Of the next ones in memory those that were used then or before, the oldest of them if they are too many."""
        if self._hand >= len(records):
            self._hand = 0
        looked_at = records[self._hand : self._hand + LOOKED_AT_MAX]
        used = _used(looked_at)
        found = np.flatnonzero(used <= oldest)
        if len(found) > most:
            found = found[np.argpartition(used[found], most - 1)[:most]]
        self._hand += LOOKED_AT_MAX
        return np.ascontiguousarray(looked_at[found])

    def _has_room_for(self, nbytes: int) -> bool:
        """On the disk. Looked at before, since the file has no journal that would mend half a write."""
        try:
            return shutil.disk_usage(Path(self._path).parent).free >= nbytes + SPARE_BYTES
        except OSError:
            return False

    def clear(self) -> None:
        with _named(self._path):
            self._rows.execute("DELETE FROM rows")
        self.marks = kernels().marks()

    def close(self) -> None:
        self._rows.close()
        Path(self._path).unlink(missing_ok=True)

    def _write(self, records: Records) -> None:
        order = np.argsort(ids_of(records).view(np.int64))
        records = records[order]
        numbers = ids_of(records).view(np.int64).tolist()
        with _named(self._path):
            self._rows.execute("BEGIN")
            self._rows.executemany(
                "INSERT OR REPLACE INTO rows VALUES (?, ?)",
                ((number, record.tobytes()) for number, record in zip(numbers, records, strict=True)),
            )
            self._rows.execute("COMMIT")
        self.marks.put(ids_of(records), marks_of(records))

    def _read(self, ids: Ids) -> Records:
        """Of ids that are here, each once, in their order."""
        if not len(ids):
            return np.zeros((0, 0), dtype=np.uint32)
        numbers = ids.view(np.int64)
        order = np.argsort(numbers)
        wanted = numbers[order].tolist()
        found: list[bytes] = []
        with _named(self._path):
            for start in range(0, len(wanted), QUERY_IDS):
                some = ",".join(map(str, wanted[start : start + QUERY_IDS]))
                query = f"SELECT record FROM rows WHERE id IN ({some}) ORDER BY id"
                found += [record for (record,) in self._rows.execute(query)]
        assert len(found) == len(ids), "a mark says what is here"
        records = np.empty((len(ids), len(found[0]) // 4), dtype=np.uint32)
        records[order] = np.frombuffer(b"".join(found), dtype=np.uint32).reshape(len(ids), -1)
        return records

    def _delete(self, ids: Ids) -> None:
        if not len(ids):
            return
        with _named(self._path):
            self._rows.execute("BEGIN")
            self._rows.executemany(
                "DELETE FROM rows WHERE id = ?", ((one,) for one in np.sort(ids.view(np.int64)).tolist())
            )
            self._rows.execute("COMMIT")
        self.marks.remove(np.ascontiguousarray(ids))


def _used(records: Records) -> npt.NDArray[np.uint64]:
    """By which update each was used last."""
    found: npt.NDArray[np.uint64] = marks_of(records) >> np.uint64(USES_BITS)
    return found


def _oldest(records: Records, count: int) -> np.uint64:
    """About so many were used then or before: exactly, where they are few."""
    sampled = _used(records[:: max(1, len(records) // SAMPLED)])
    place = min(len(sampled) - 1, count * len(sampled) // len(records))
    return np.uint64(np.partition(sampled, place)[place])


class _named:
    """A disk that fails is a StorageError with a name."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise StorageUnavailable(
                f"{self._path}, which holds the rows that are used least, failed: {error}",
                hint="free some space there, or name another directory",
            ) from error
