"""One shard of a table: its rows, and how updates change them. A pure function of the updates, in their order.

Replicas that apply the same updates agree to the bit, whichever kernels they compute with and wherever their rows lie
(rows/, cold.py). The clock is the number of updates; time that passes outside comes with them.

Rows end oldest first, by (last update, id). So one number says what is gone: the horizon. Every row and every sighting
at or below it is removed, nothing below it ever comes back, and whoever follows needs no list of what was removed.

What changed since update n is every row whose mark is above n, and the horizon. Such `Changes` bring any shard that is
at n or later, up to where they end, to the bit; from 0 on they are the whole shard. They can be applied twice.

Owned by one thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from holdfast.core.errors import ProtocolError
from holdfast.core.words import encode_json
from holdfast.tables.cold import ColdRows
from holdfast.tables.horizon import LAST_ID, NOTHING, Horizon, below, nth_oldest, pair
from holdfast.tables.rows.choosing import kernels
from holdfast.tables.rows.port import (
    UPDATES_MAX,
    USES_BITS,
    Counts,
    Ids,
    Layout,
    MarkValues,
    Records,
    Rule,
    Values,
    ids_of,
    marks_of,
)
from holdfast.tables.settings import TableSettings
from holdfast.tables.unit_ranges import UnitRanges, covers, decode_ranges, with_unit

CHECKS = 16  # how often in an age it is looked whether rows have reached it; how much of its rows a full shard removes
BLOCK_ROWS = 1 << 14  # hashed or written at once


@dataclass(frozen=True)
class Moment:
    """Where a shard is, apart from its rows."""

    updates: int = 0  # applied so far
    time: int = 0  # the latest that an update has told, in milliseconds
    past: tuple[tuple[int, int], ...] = ()  # (time, updates), now and then: when rows were that are old by the clock
    horizon: Horizon = NOTHING  # of rows and sightings
    forgotten: Horizon = NOTHING  # of sightings alone, of which there were too many
    units: UnitRanges = ()  # of which there were updates, where these say so

    def encode(self) -> dict[str, Any]:
        units = {"units": [list(one) for one in self.units]} if self.units else {}
        return {
            **units,
            "updates": self.updates,
            "time": self.time,
            "past": [list(one) for one in self.past],
            "horizon": list(self.horizon),
            "forgotten": list(self.forgotten),
        }

    @classmethod
    def decode(cls, told: Any) -> Moment:
        """ProtocolError for what no shard encodes."""
        try:
            past = tuple(pair(one) for one in told["past"])
            horizons = pair(told["horizon"]), pair(told["forgotten"])
            moment = cls(told["updates"], told["time"], past, *horizons, decode_ranges(told.get("units", ())))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the moment of a shard: {str(error)[:100]}") from error
        if not all(type(one) is int and one >= 0 for one in (moment.updates, moment.time)) or len(past) > 4 * CHECKS:
            raise ProtocolError("not the moment of a shard")
        return moment


@dataclass(frozen=True)
class Changes:
    """Everything after the update `since`, up to the moment."""

    since: int
    moment: Moment
    records: Records  # rows that changed
    candidates: tuple[Ids, MarkValues]


@dataclass
class TableShard:
    settings: TableSettings
    cold: ColdRows | None = None  # where rows go that are used least, if there is a disk for them
    moment: Moment = field(default_factory=Moment)

    def __post_init__(self) -> None:
        self.kernels = kernels()
        self._rows = self.kernels.rows(self.settings)

    def __len__(self) -> int:
        return len(self._rows) + (len(self.cold) if self.cold else 0)

    @property
    def updates(self) -> int:
        return self.moment.updates

    @property
    def layout(self) -> Layout:
        return self._rows.layout

    @property
    def candidates(self) -> int:
        """Ids that have been seen, and not often enough for a row."""
        return len(self._rows.candidates)

    @property
    def memory_bytes(self) -> int:
        return self._rows.nbytes + (self.cold.memory_bytes if self.cold else 0)

    # ---- reading

    def look_up(self, ids: Ids) -> Values:
        """Changes nothing: who only reads leaves no trace, and replicas need not agree on it."""
        values = self._rows.look_up(ids)
        if self.cold is not None:
            self.cold.look_up(ids, values)
        return values

    # ---- updating

    def update(
        self,
        ids: Ids,
        gradients: Values,
        *,
        lr: float,
        time: int = 0,
        times: Counts | None = None,
        unit: int | None = None,
    ) -> None:
        """One update: each id once or more, a gradient for each. `time`: in milliseconds, of whoever sends it.

        `unit`: of data that may be made again, by another worker or after a resume: it changes rows once.
        """
        if unit is not None and covers(self.moment.units, unit):
            return
        assert gradients.shape == (len(ids), self.settings.dim)
        updates = self.updates + 1
        assert updates <= UPDATES_MAX
        united = self.kernels.unite(ids, times)
        sums = self.kernels.add_up(united, gradients)
        if self.cold is not None:
            self._rows.put(self.cold.take(united.ids))
        self._rows.step(united, sums, Rule.of(self.settings.optimizer, lr), update=updates, admit=self.settings.admit)
        self._advance(updates, time)
        self._forget_candidates()
        if unit is not None:
            self.moment = replace(self.moment, units=with_unit(self.moment.units, unit))
        if self.cold is not None:
            self.cold.relieve(self._rows)

    def _advance(self, updates: int, time: int) -> None:
        expire, was = self.settings.expire, self.moment
        time = max(time, was.time)
        past, horizon = was.past, was.horizon
        if expire.seconds is not None:
            age = int(expire.seconds * 1000)
            if not past or time - past[-1][0] >= max(1, age // CHECKS):
                past = (*past, (time, updates))
                old = bisect.bisect_right(past, (time - age, UPDATES_MAX))
                if old:
                    horizon = max(horizon, (past[old - 1][1], LAST_ID))
                    past = past[old - 1 :]
        if expire.updates is not None and updates % max(1, expire.updates // CHECKS) == 0:
            horizon = max(horizon, (updates - expire.updates, LAST_ID))
        if expire.rows is not None and len(self) > expire.rows:
            most = expire.rows - expire.rows // CHECKS
            horizon = max(horizon, self._oldest(len(self) - most))
        self.moment = Moment(updates, time, past, horizon, was.forgotten, was.units)
        if horizon != was.horizon:
            self._remove_below(horizon)

    def _oldest(self, count: int) -> Horizon:
        """The horizon that so many rows are below."""
        ids, marks = self._all_marks()
        return nth_oldest(ids, marks, count)

    def _all_marks(self) -> tuple[Ids, MarkValues]:
        records = self._rows.records()
        ids, marks = ids_of(records), marks_of(records)
        if self.cold is None:
            return ids, marks
        others = self.cold.marks.all()
        return np.concatenate([ids, others[0]]), np.concatenate([marks, others[1]])

    def _remove_below(self, horizon: Horizon) -> None:
        records = self._rows.records()
        ids = ids_of(records)
        self._rows.remove(ids[below(ids, marks_of(records), horizon)])
        if self.cold is not None:
            self.cold.remove_below(horizon)
        self._remove_candidates(horizon)

    def _remove_candidates(self, horizon: Horizon) -> None:
        ids, marks = self._rows.candidates.all()
        self._rows.candidates.remove(ids[below(ids, marks, horizon)])

    def _forget_candidates(self) -> None:
        count, most = self.candidates, self.settings.candidates_max
        if count > most:
            forgotten = nth_oldest(*self._rows.candidates.all(), count - most // 2)
            self.moment = replace(self.moment, forgotten=forgotten)
            self._remove_candidates(forgotten)

    # ---- changes

    def changes(self, since: int = 0) -> Changes:
        """What changed after that update. From 0 on it is everything, by reference: it changes with the next call."""
        oldest = np.uint64((since + 1) << USES_BITS)
        records = self._rows.records()
        changed = records if since == 0 else records[marks_of(records) >= oldest]
        if self.cold is not None:
            changed = np.concatenate([changed, self.cold.newer(oldest, self.layout)])
        ids, marks = self._rows.candidates.all()
        newer = np.flatnonzero(marks >= oldest)
        newer = newer[np.argsort(ids[newer])]  # where they lie follows from the room that there was for them
        return Changes(since, self.moment, changed, (ids[newer], marks[newer]))

    def apply_changes(self, changes: Changes) -> None:
        """What `changes` gave on another shard with these settings. ProtocolError for what does not follow on this."""
        if changes.since > self.updates or changes.moment.updates < self.updates:
            raise ProtocolError(
                f"changes from update {changes.since} to {changes.moment.updates}, and the shard is at {self.updates}"
            )
        if changes.records.dtype != np.uint32 or changes.records.shape[1:] != (self.layout.words,):
            raise ProtocolError("changes of rows of another size")
        records = np.ascontiguousarray(changes.records)
        ids, candidates = ids_of(records), self._rows.candidates
        if self.cold is not None:
            self.cold.take(ids)
        self._rows.put(records)
        candidates.remove(ids)
        candidates.put(*(np.ascontiguousarray(one) for one in changes.candidates))
        self.moment = changes.moment
        self._remove_below(changes.moment.horizon)
        self._remove_candidates(changes.moment.forgotten)
        if self.cold is not None:
            self.cold.relieve(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        if self.cold is not None:
            self.cold.clear()
        self.moment = Moment()

    def digest(self) -> str:
        """Of everything but where rows lie: two shards that have applied the same updates have the same."""
        hasher = xxhash.xxh3_128()
        hasher.update(encode_json({"settings": self.settings.encode(), "moment": self.moment.encode()}))
        ids, marks = self._rows.candidates.all()
        order = np.argsort(ids)
        hasher.update(ids[order].tobytes())
        hasher.update(marks[order].tobytes())
        for block in self._in_order():
            hasher.update(block.tobytes())
        return hasher.hexdigest()

    def _in_order(self) -> Iterator[Records]:
        ids, _ = self._all_marks()
        ids = np.sort(ids)
        for start in range(0, len(ids), BLOCK_ROWS):
            some = ids[start : start + BLOCK_ROWS]
            found = self._rows.find(some)
            block = self._rows.records()[np.maximum(found, 0)] if len(self._rows) else self._empty(len(some))
            if self.cold is not None:
                self.cold.fill(some, found < 0, block)
            yield block

    def _empty(self, count: int) -> Records:
        return np.zeros((count, self.layout.words), dtype=np.uint32)
