"""holdfast.tables.follow: look-ups in a table that is trained elsewhere, from its log, for online inference.

A follower reads the newest base and the deltas after it, and then what comes, every so often, in a thread of its own.
It holds values only. What it serves is whole: the table as it was at one moment, for each shard, never half of a delta.
It says how old that is, and refuses to serve what is older than it was asked for. Where the log is damaged or cannot be
read it serves what it has, says what the trouble is, and goes on with the next base that is whole.

The thread owns the reading; the lock guards what look-ups see: the shards, their entries and the trouble.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, ProtocolError, StorageError, StorageUnavailable
from holdfast.tables.log_format import TableLogEntry, as_told, bases, check_follows, place_of, read_entry, read_pieces
from holdfast.tables.module import numbers_of
from holdfast.tables.settings import SGD
from holdfast.tables.shard import TableShard
from holdfast.tables.stores import spread

BEGIN_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0


def follow(uri: str, *, every_s: float = 1.0, staleness_s: float | None = None) -> Follower:
    """Look-ups in the table whose log is at `uri`, which is looked at every so many seconds.

    `staleness_s`: a look-up fails rather than give rows that are older. Waits for the first base, for a minute.
    """
    if not every_s > 0 or (staleness_s is not None and not staleness_s > 0):
        raise ConfigError("a follower needs times above 0", hint="follow(uri, every_s=1.0, staleness_s=60.0)")
    follower = Follower(open_storage(uri), staleness_s=staleness_s)
    follower.begin(every_s)
    return follower


class _Followed:
    """One shard, and the entry it is at."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.state: TableShard | None = None
        self.entry: TableLogEntry | None = None


class Follower:
    def __init__(
        self, storage: Storage, *, staleness_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.trouble = ""  # what keeps it from getting on; empty: nothing
        self._storage = storage
        self._staleness_s = staleness_s
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: list[_Followed] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, every_s: float, *, timeout_s: float = BEGIN_TIMEOUT_S) -> None:
        """Read what there is, and then go on in a thread. StorageError if there is nothing to serve in time."""
        deadline = time.monotonic() + timeout_s
        while not self.refresh():
            if time.monotonic() > deadline:
                raise StorageUnavailable(
                    f"there are no rows at {self._storage.uri}: {self.trouble or 'no log'}",
                    hint="publish the table there first: holdfast.tables.publish(table, uri).write()",
                )
            self._ended.wait(min(every_s, 0.5))
        self._thread = threading.Thread(target=self._go_on, args=(every_s,), name="holdfast-follower", daemon=True)
        self._thread.start()

    def _go_on(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            self.refresh()

    def refresh(self) -> bool:
        """Read what is new. Whether there is something to serve; `trouble` says what was in the way."""
        trouble = ""
        try:
            for followed in self._places():
                self._advance(followed)
        except (StorageError, ProtocolError) as error:
            trouble = as_told(error)
        with self._lock:
            self.trouble = trouble
            return bool(self._shards) and all(one.state is not None for one in self._shards)

    def _places(self) -> list[_Followed]:
        if not self._shards:
            names = {name for stored in self._storage.list() if "-of-" in (name := stored.name.partition("/")[0])}
            if not names:
                return []
            count = int(min(names).partition("-of-")[2])
            wanted = {place_of(shard, count) for shard in range(count)}
            if names != wanted:
                raise IntegrityError(f"{self._storage.uri} has the logs {', '.join(sorted(names)[:5])}")
            self._shards = [_Followed(place) for place in sorted(wanted)]
        return self._shards

    def _advance(self, followed: _Followed) -> None:
        """As far as the log is whole. StorageError if it is not, with what there is kept."""
        try:
            if followed.entry is not None and self._follow_on(followed):
                return
        except (IntegrityError, NotStored):  # damaged, or removed meanwhile as something old
            if not self._begin_anew(followed):
                raise
        else:
            if not self._begin_anew(followed):
                return
        self._follow_on(followed)

    def _follow_on(self, followed: _Followed) -> bool:
        """The deltas after the entry that the shard is at. False: a base comes next, or nothing is known of it."""
        assert followed.entry is not None and followed.state is not None
        while True:
            try:
                entry = read_entry(self._storage, followed.place, followed.entry.sequence + 1)
            except NotStored:
                return self._is_there(followed.place, followed.entry)
            if entry.base:
                return False
            check_follows(entry, followed.entry)
            pieces = list(read_pieces(self._storage, entry, values_only=True))
            with self._lock:
                for piece in pieces:
                    followed.state.apply_changes(piece)
                followed.entry = entry

    def _is_there(self, place: str, entry: TableLogEntry) -> bool:
        """It has not been removed because so much comes after it."""
        try:
            return read_entry(self._storage, place, entry.sequence).checksum == entry.checksum
        except NotStored:
            return False

    def _begin_anew(self, followed: _Followed) -> bool:
        """From the newest base that is whole, beside what is served meanwhile. False: there is none that is newer."""
        trouble: StorageError | None = None
        for base in bases(self._storage, followed.place, -1 if followed.entry is None else followed.entry.sequence):
            state = TableShard(replace(base.settings, optimizer=SGD()))
            try:
                for piece in read_pieces(self._storage, base, values_only=True):
                    state.apply_changes(piece)
            except (IntegrityError, NotStored) as error:
                trouble = trouble or error
                continue
            with self._lock:
                followed.state, followed.entry = state, base
            return True
        if trouble is not None:
            raise trouble
        return False

    # ---- serving

    @property
    def updates(self) -> tuple[int, ...]:
        """That are in what is served, for each shard."""
        with self._lock:
            return tuple(0 if one.entry is None else one.entry.moment.updates for one in self._shards)

    @property
    def staleness_s(self) -> float:
        """How long ago what is served was the newest, by this host's clock and the writer's."""
        with self._lock:
            return self._staleness()

    def _staleness(self) -> float:
        times = [one.entry.at_ms / 1000.0 for one in self._shards if one.entry is not None]
        return max(0.0, self._clock() - min(times)) if times else float("inf")

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """A row for each id; first values where the table has none. StorageUnavailable if they are too old."""
        numbers = numbers_of(ids)
        with self._lock:
            states = [one.state for one in self._shards]
            if not states or any(state is None for state in states):
                raise StorageUnavailable(f"nothing is read from {self._storage.uri} yet", hint=self.trouble or "wait")
            old_s = self._staleness()
            if self._staleness_s is not None and old_s > self._staleness_s:
                raise StorageUnavailable(
                    f"the rows are {old_s:.1f} s old, and at most {self._staleness_s:g} s are asked for",
                    hint=self.trouble or "let the training publish more often",
                )
            known = [state for state in states if state is not None]
            dim = known[0].settings.dim
            values = np.empty((len(numbers), dim), dtype=np.float32)
            for shard, some in spread(numbers, len(known)):
                values[some] = known[shard].look_up(numbers[some])
        return torch.from_numpy(values).view(*ids.shape, dim)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
        self._storage.close()
