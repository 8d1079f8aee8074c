"""The same as rows.c with numpy and dicts, for machines without a compiler. Every bit is the same.

Only operations on single numbers are used, which every processor rounds alike, each in the order in which rows.c has
them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.tables.rows.port import (
    HEADER_WORDS,
    USES_BITS,
    USES_MAX,
    Counts,
    FirstValues,
    Ids,
    Layout,
    MarkValues,
    Records,
    Rule,
    United,
    Values,
    ids_of,
    marks_of,
)
from holdfast.tables.settings import TableSettings

LANES = 16
ENTRY_BYTES = 100  # of a dict with two numbers, about
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PlainKernels:
    def unite(self, ids: Ids, times: Counts | None) -> United:
        numbers: dict[int, int] = {}
        which = np.array([numbers.setdefault(one, len(numbers)) for one in ids.tolist()], dtype=np.int32)
        seen = np.zeros(len(numbers), dtype=np.uint64)
        np.add.at(seen, which, 1 if times is None else times.astype(np.uint64))
        unique = np.fromiter(numbers, dtype=np.uint64, count=len(numbers))
        return United(unique, which, np.minimum(seen, USES_MAX).astype(np.uint32))

    def add_up(self, united: United, gradients: Values) -> Values:
        first = np.full(len(united.ids), len(gradients), dtype=np.int64)
        np.minimum.at(first, united.which, np.arange(len(gradients)))
        sums = gradients[first]
        later = np.ones(len(gradients), dtype=bool)
        later[first] = False
        np.add.at(sums, united.which[later], gradients[later])  # one after another, in this order
        return sums

    def rows(self, settings: TableSettings) -> PlainRows:
        return PlainRows(settings)

    def marks(self) -> PlainMarks:
        return PlainMarks()


class PlainMarks:
    def __init__(self) -> None:
        self._marks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * len(self)

    def get(self, ids: Ids) -> MarkValues:
        return np.array([self._marks.get(one, 0) for one in ids.tolist()], dtype=np.uint64)

    def put(self, ids: Ids, marks: MarkValues) -> None:
        self._marks.update(zip(ids.tolist(), marks.tolist(), strict=True))

    def remove(self, ids: Ids) -> None:
        for one in ids.tolist():
            self._marks.pop(one, None)

    def all(self) -> tuple[Ids, MarkValues]:
        ids = np.fromiter(self._marks, dtype=np.uint64, count=len(self))
        return ids, np.fromiter(self._marks.values(), dtype=np.uint64, count=len(self))


class PlainRows:
    def __init__(self, settings: TableSettings) -> None:
        self.layout = Layout.of(settings)
        self._first = FirstValues.of(settings)
        self.clear()

    def clear(self) -> None:
        self.candidates = PlainMarks()
        self._index: dict[int, int] = {}
        self._memory = np.zeros((16, self.layout.words), dtype=np.uint32)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return int(self._memory.nbytes) + ENTRY_BYTES * len(self) + self.candidates.nbytes

    def records(self) -> Records:
        return self._memory[: len(self)]

    def look_up(self, ids: Ids) -> Values:
        found, dim = self.find(ids), self.layout.dim
        missing = found < 0
        out = np.empty((len(ids), dim), dtype=np.float32)
        out[~missing] = self._memory.view(np.float32)[found[~missing], HEADER_WORDS : HEADER_WORDS + dim]
        out[missing] = first_values(self._first, ids[missing], dim)
        return out

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        return np.array([self._index.get(one, -1) for one in ids.tolist()], dtype=np.int64)

    def step(self, united: United, sums: Values, rule: Rule, *, update: int, admit: int) -> None:
        found = self._admitted(united, update, admit)
        there = found >= 0
        here = found[there]
        marks = self._memory[:, 2:4]
        uses = np.minimum((marks_of(self._memory[here]) & np.uint64(USES_MAX)) + np.uint64(1), np.uint64(USES_MAX))
        marks[here] = (np.uint64(update << USES_BITS) | uses).view(np.uint32).reshape(-1, 2)
        body = self._memory.view(np.float32)
        start, dim = HEADER_WORDS, self.layout.dim
        values, kept = body[here, start : start + dim], body[here, start + dim : start + dim + self.layout.state]
        values, kept = stepped(rule, uses.astype(np.int64), values, kept, sums[there])
        body[here, start : start + dim] = values
        body[here, start + dim : start + dim + self.layout.state] = kept

    def _admitted(self, united: United, update: int, admit: int) -> npt.NDArray[np.int64]:
        found = self.find(united.ids)
        waiting = self.candidates._marks
        for at in np.flatnonzero(found < 0).tolist():
            one = int(united.ids[at])
            if admit > 1:
                times = (waiting.get(one, 0) & USES_MAX) + int(united.seen[at])
                if times < admit:
                    waiting[one] = update << USES_BITS | times
                    continue
                waiting.pop(one, None)
            found[at] = self._appended(united.ids[at : at + 1])
            made = self._memory[found[at]]
            made[2:4] = np.array([update << USES_BITS], dtype=np.uint64).view(np.uint32)
            values = first_values(self._first, united.ids[at : at + 1], self.layout.dim)[0]
            made[HEADER_WORDS : HEADER_WORDS + self.layout.dim] = values.view(np.uint32)
            made[HEADER_WORDS + self.layout.dim :] = 0
        return found

    def _appended(self, one: Ids) -> int:
        row = len(self._index)
        if row == len(self._memory):
            self._memory = np.concatenate([self._memory, np.zeros_like(self._memory)])
        self._index[int(one[0])] = row
        self._memory[row, 0:2] = one.view(np.uint32)
        return row

    def put(self, records: Records) -> None:
        ids = ids_of(records)
        for at, found in enumerate(self.find(ids).tolist()):
            row = found if found >= 0 else self._appended(ids[at : at + 1])
            self._memory[row] = records[at]

    def remove(self, ids: Ids) -> int:
        removed = 0
        for one in ids.tolist():
            row = self._index.pop(one, None)
            if row is None:
                continue
            removed += 1
            last = len(self._index)
            if row != last:
                self._memory[row] = self._memory[last]
                self._index[int(ids_of(self._memory[last : last + 1])[0])] = row
        return removed


def mixed_ids(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def first_values(first: FirstValues, ids: Ids, dim: int) -> Values:
    base = mixed_ids(mixed_ids(ids) ^ np.uint64(first.seed))
    drawn = mixed_ids(base[:, None] + np.arange(1, dim + 1, dtype=np.uint64)[None, :] * _GOLDEN)
    if first.uniform:
        spread = (drawn >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    else:
        parts = [(drawn >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48)]
        spread = (sum(parts[1:], parts[0]).astype(np.int64) - 131070).astype(np.float32)
    return spread * first.scale


def stepped(rule: Rule, uses: npt.NDArray[np.int64], p: Values, s: Values, g: Values) -> tuple[Values, Values]:
    """Values and what the optimizer keeps, after the row's update with this number."""
    if rule.decay != 0.0 and rule.kind != "adamw":
        g = g + rule.decay * p
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if rule.kind == "sgd":
            return p - rule.lr * g, s
        if rule.kind == "adagrad":
            s = s + g * g
            root: Values = np.sqrt(s)
            return p - (rule.lr * g) / (root + rule.eps), s
        if rule.kind == "rowwise-adagrad":
            s = s + (square_sums(g) / np.float32(g.shape[1]))[:, None]
            factors: Values = rule.lr / (np.sqrt(s) + rule.eps)
            return p - factors * g, s
        dim = p.shape[1]
        at = np.minimum(uses, len(rule.corrections[0]) - 1)
        by_first, by_second = rule.lr * rule.corrections[0][at][:, None], rule.corrections[1][at][:, None]
        keep = np.float32(1.0) - rule.lr * rule.decay if rule.kind == "adamw" else np.float32(1.0)
        m = rule.betas[0] * s[:, :dim] + rule.rests[0] * g
        v = rule.betas[1] * s[:, dim:] + (rule.rests[1] * g) * g
        return keep * p - (by_first * m) / (np.sqrt(v) * by_second + rule.eps), np.concatenate([m, v], axis=1)


def square_sums(g: Values) -> Values:
    """Of each row, in so many lanes that are added up two by two."""
    dim = g.shape[1]
    padded = np.zeros((len(g), -(-dim // LANES) * LANES), dtype=np.float32)
    padded[:, :dim] = g
    lanes = np.zeros((len(g), LANES), dtype=np.float32)
    for start in range(0, padded.shape[1], LANES):
        lanes = lanes + padded[:, start : start + LANES] * padded[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
