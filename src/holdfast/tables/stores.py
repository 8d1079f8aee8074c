"""Where a table's rows are: a port, and the store within this process.

A store has shards; an id belongs to one of them by a hash. Only touched rows travel: a look-up asks, and an update goes
to, those shards that have some of its ids. Used by one thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import DivergedError
from holdfast.tables.cold import ColdRows
from holdfast.tables.rows.plain import mixed_ids
from holdfast.tables.rows.port import Counts, Ids, Values
from holdfast.tables.settings import TableSettings
from holdfast.tables.shard import Changes, TableShard

_SALT = np.uint64(0xD1B54A32D192ED03)  # so that a shard's ids are spread over its index as others are


class TableStore(Protocol):
    settings: TableSettings

    @property
    def history(self) -> str:
        """Another one after rows came from elsewhere: what changed since then cannot be told by updates alone."""

    @property
    def shards(self) -> int: ...

    def look_up(self, ids: Ids) -> Values: ...

    def push(
        self, ids: Ids, gradients: Values, *, lr: float, times: Counts | None = None, unit: int | None = None
    ) -> None:
        """One update. DivergedError, with nothing applied, for a gradient that is not finite.

        `unit`: of the run's data; where several workers make units, one that is made again changes rows once.
        """

    def updates(self, shard: int) -> int:
        """That the shard has applied."""

    def changes(self, shard: int, since: int = 0) -> Changes:
        """What changed in the shard after that update."""

    def restore(self, shards: Sequence[Changes]) -> None:
        """Everything, from changes since 0, of each shard."""

    def put_back(self, shards: Sequence[Changes]) -> None:
        """Like `restore`, and what the shards have trained since then is gone."""

    def flush(self) -> None:
        """Until all updates are acknowledged."""

    def sent(self) -> Callable[[], None]:
        """Waits, in whichever thread calls it, until all updates up to now are acknowledged."""


def shard_of(ids: Ids, shards: int) -> npt.NDArray[np.uint64]:
    return mixed_ids(ids ^ _SALT) % np.uint64(shards)


def spread(ids: Ids, shards: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """The shards that have some of these ids, and which of them."""
    if shards == 1:
        if len(ids):
            yield 0, np.arange(len(ids))
        return
    owners = shard_of(ids, shards)
    for shard in range(shards):
        some = np.flatnonzero(owners == np.uint64(shard))
        if len(some):
            yield shard, some


def check_finite(gradients: Values, whose: str) -> None:
    if not np.isfinite(gradients).all():
        raise DivergedError(f"a gradient of {whose} is not finite, and nothing of the update is applied")


def time_of_update(settings: TableSettings) -> int:
    """In milliseconds; 0 where no row is old by the clock, so that two trainings have the same bits."""
    return 0 if settings.expire.seconds is None else int(time.time() * 1000)


class LocalStore:
    """In this process. With `disk`, at most `rows_in_memory` rows are in memory and the others in a file there."""

    def __init__(
        self,
        settings: TableSettings,
        *,
        shards: int = 1,
        rows_in_memory: int | None = None,
        disk: Path | None = None,
    ) -> None:
        self.settings = settings
        self.history = secrets.token_hex(8)
        self.states = [TableShard(settings) for _ in range(shards)]
        if rows_in_memory is not None and disk is not None:
            for state in self.states:
                state.cold = ColdRows(disk, max(1, rows_in_memory // shards))

    @property
    def shards(self) -> int:
        return len(self.states)

    def look_up(self, ids: Ids) -> Values:
        if self.shards == 1:
            return self.states[0].look_up(ids)
        values = np.empty((len(ids), self.settings.dim), dtype=np.float32)
        for shard, some in spread(ids, self.shards):
            values[some] = self.states[shard].look_up(ids[some])
        return values

    def push(
        self, ids: Ids, gradients: Values, *, lr: float, times: Counts | None = None, unit: int | None = None
    ) -> None:
        check_finite(gradients, "the table")
        moment = time_of_update(self.settings)
        if self.shards == 1:
            self.states[0].update(ids, gradients, lr=lr, time=moment, times=times)
            return
        for shard, some in spread(ids, self.shards):
            counts = None if times is None else times[some]
            self.states[shard].update(ids[some], gradients[some], lr=lr, time=moment, times=counts)

    def flush(self) -> None:
        """An update is applied when `push` returns."""

    def sent(self) -> Callable[[], None]:
        return lambda: None

    def updates(self, shard: int) -> int:
        return self.states[shard].updates

    def changes(self, shard: int, since: int = 0) -> Changes:
        return self.states[shard].changes(since)

    def restore(self, shards: Sequence[Changes]) -> None:
        """Everything anew, from changes since 0."""
        assert len(shards) == len(self.states)
        self.history = secrets.token_hex(8)
        for state, changes in zip(self.states, shards, strict=True):
            state.clear()
            state.apply_changes(changes)

    def put_back(self, shards: Sequence[Changes]) -> None:
        self.restore(shards)
