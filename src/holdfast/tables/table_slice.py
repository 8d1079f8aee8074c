"""A table's shard as a replicated state: what its updates and its queries look like, and what they do.

    create    the table's settings. The first one counts
    update    ids, a gradient for each, how often each was seen, the learning rate, the sender's time; where units
              of data may be made again, which one it is of: an update of a unit that the shard has had is passed over
    fill      rows from a log: changes since 0, in pieces. What the shard has trained since then stays. Rows of a
              checkpoint have a history: the first piece removes what there was, and rows from a log do not count then
    skip      nothing: an update that was refused has left its place in the order empty

    look up   the rows of some ids                      changes   what changed since an update
    moment    where the shard is, and whether it is created

A body of an update is the ids, the gradients, and the counts if there are any; of changes, the records and the marks of
ids that are not admitted yet. `capture` is the changes since 0. Which replica answers does not matter: all have the
same bits.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import ProtocolError
from holdfast.servers.replicated import HEAD_BYTES_MAX, Answer, Author, Head, Payload
from holdfast.tables.cold import ColdTier
from holdfast.tables.rows.port import Counts, Ids, Layout, Records, Values
from holdfast.tables.settings import TableSettings
from holdfast.tables.shard import Changes, Moment, TableShard
from holdfast.tables.stores import check_finite
from holdfast.tables.unit_ranges import UNIT_MAX

LOOKED_UP_MAX = 1 << 18  # ids of one query: they travel in its head
IDS_MAX = 1 << 24  # of one update
TIME_MAX = 1 << 52
HISTORY_CHARACTERS_MAX = 64

assert LOOKED_UP_MAX * 8 * 4 // 3 < HEAD_BYTES_MAX - 4096


def create_head(settings: TableSettings) -> Head:
    return {"kind": "create", "settings": settings.encode()}


def update_of(
    ids: Ids, gradients: Values, times: Counts | None, *, lr: float, time: int, unit: int | None = None
) -> Answer:
    of_unit: Head = {} if unit is None else {"unit": unit}
    head = {"kind": "update", "count": len(ids), "lr": lr, "time": time, "times": times is not None, **of_unit}
    arrays: list[npt.NDArray[Any]] = [ids, gradients]
    return Answer(head, _views(arrays if times is None else [*arrays, times]))


def fill_of(changes: Changes, rows: int, history: str = "") -> Iterator[Answer]:
    """In pieces of so many rows, each of which says where the shard is when it has them all."""
    ids, marks = changes.candidates
    for start in range(0, max(1, len(changes.records), len(ids)), rows):
        some = slice(start, start + rows)
        piece = _answer(Changes(0, changes.moment, changes.records[some], (ids[some], marks[some])))
        yield Answer(
            {**piece.head, "kind": "fill", "history": history, "begins": bool(history) and not start}, piece.views
        )


def look_up_query(ids: Ids) -> Head:
    assert len(ids) <= LOOKED_UP_MAX
    return {"kind": "look up", "ids": base64.b64encode(ids.tobytes()).decode()}


def changes_query(since: int) -> Head:
    return {"kind": "changes", "since": since}


def decode_changes(head: Head, body: memoryview, settings: TableSettings) -> Changes:
    """What a shard answered. ProtocolError for what none does."""
    words = Layout.of(settings).words
    records, candidates = _whole(head, "records", IDS_MAX << 8), _whole(head, "candidates", IDS_MAX << 8)
    if body.nbytes != 4 * words * records + 16 * candidates:
        raise ProtocolError("changes with another number of bytes than of rows")
    rows: Records = _array(body, 0, np.uint32, records * words).reshape(-1, words)
    edge = 4 * words * records
    marks = _array(body, edge, np.uint64, 2 * candidates).reshape(2, -1)
    return Changes(_whole(head, "since", TIME_MAX), Moment.decode(head.get("moment")), rows, (marks[0], marks[1]))


class TableSlice:
    def __init__(self, tier: ColdTier | None = None) -> None:
        """`tier`: where rows go that are used least; None: all are in memory."""
        self._tier = tier
        self._shard: TableShard | None = None
        self._history = ""  # of whom its numbers of updates are, since rows came back from a checkpoint

    @property
    def version(self) -> int:
        return self._shard.updates if self._shard is not None else 0

    # ---- updates

    def check(self, author: Author, payload: Payload) -> None:
        kind = payload.head.get("kind")
        if kind == "create":
            settings = TableSettings.decode(payload.head.get("settings"))
            if self._shard is not None and self._shard.settings != settings:
                raise ProtocolError("the run has a table of this name with other settings")
        elif kind == "update":
            _, gradients, _ = self._update(payload)
            check_finite(gradients, f"an update of {author.worker}.{author.incarnation}")
        elif kind == "fill":
            changes = decode_changes(payload.head, payload.body, self._created().settings)
            if changes.since:
                raise ProtocolError("a table is filled with what changed since 0")
            if payload.head.get("begins") is True and not _history(payload.head):
                raise ProtocolError("rows of a checkpoint without a history")
        elif kind != "skip":
            raise ProtocolError(f"a table takes no {kind!r:.40}")

    def apply(self, author: Author, payload: Payload) -> None:
        kind = payload.head["kind"]
        if kind == "create":
            if self._shard is None:
                self._shard = self._new_shard(TableSettings.decode(payload.head["settings"]))
        elif kind == "update":
            ids, gradients, times = self._update(payload)
            lr, time, unit = payload.head["lr"], payload.head["time"], payload.head.get("unit")
            self._created().update(ids, gradients, lr=lr, time=time, times=times, unit=unit)
        elif kind == "fill":
            changes = decode_changes(payload.head, payload.body, self._created().settings)
            history = _history(payload.head)
            if payload.head.get("begins") is True:
                self._history = history
                self._created().clear()
            if history == self._history and self._created().updates <= changes.moment.updates:
                self._created().apply_changes(changes)

    def forget(self, worker: str, incarnation: int) -> None:
        """A table keeps nothing of workers."""

    def _new_shard(self, settings: TableSettings) -> TableShard:
        return TableShard(settings, self._tier.begin() if self._tier is not None else None)

    def _created(self) -> TableShard:
        if self._shard is None:
            raise ProtocolError("the table is not created yet")
        return self._shard

    def _update(self, payload: Payload) -> tuple[Ids, Values, Counts | None]:
        head, body, dim = payload.head, payload.body, self._created().settings.dim
        count, with_times, lr = _whole(head, "count", IDS_MAX), head.get("times"), head.get("lr")
        _whole(head, "time", TIME_MAX)
        if "unit" in head:
            _whole(head, "unit", UNIT_MAX)
        is_rate = isinstance(lr, int | float) and math.isfinite(lr) and lr >= 0
        if type(with_times) is not bool or not is_rate:
            raise ProtocolError("an update whose head makes no sense")
        if body.nbytes != count * (8 + 4 * dim + 4 * with_times):
            raise ProtocolError(f"an update of {count} rows of {dim} in {body.nbytes} bytes")
        ids: Ids = _array(body, 0, np.uint64, count)
        gradients: Values = _array(body, 8 * count, np.float32, count * dim).reshape(count, dim)
        times: Counts | None = _array(body, count * (8 + 4 * dim), np.uint32, count) if with_times else None
        return ids, gradients, times

    # ---- reads

    def read(self, query: Head) -> Answer | None:
        kind = query.get("kind")
        if kind == "moment":
            moment = self._shard.moment.encode() if self._shard is not None else None
            return Answer({"created": self._shard is not None, "moment": moment, "history": self._history})
        shard = self._created()
        if kind == "look up":
            values = shard.look_up(_ids(query.get("ids")))
            return Answer({"version": shard.updates, "count": len(values)}, _views([values]))
        if kind == "changes":
            since = _whole(query, "since", TIME_MAX)
            return _answer(shard.changes(since if since <= shard.updates else 0))
        raise ProtocolError(f"a table answers no {kind!r:.40}")

    def capture(self) -> Answer:
        if self._shard is None:
            return Answer({"settings": None})
        answer = _answer(self._shard.changes())
        told = {"settings": self._shard.settings.encode(), "history": self._history}
        return Answer({**answer.head, **told}, answer.views)

    def restore(self, payload: Payload) -> None:
        told = payload.head.get("settings")
        if told is None:
            self._shard = None
            return
        settings, self._history = TableSettings.decode(told), _history(payload.head)
        shard = self._new_shard(settings)
        shard.apply_changes(decode_changes(payload.head, payload.body, settings))
        self._shard = shard

    def digest(self) -> str:
        return self._shard.digest() if self._shard is not None else "not created"


def _answer(changes: Changes) -> Answer:
    ids, marks = changes.candidates
    head = {
        "since": changes.since,
        "moment": changes.moment.encode(),
        "records": len(changes.records),
        "candidates": len(ids),
    }
    return Answer(head, _views([changes.records, ids, marks]))


def _views(arrays: Sequence[npt.NDArray[Any]]) -> list[memoryview]:
    return [np.ascontiguousarray(one).reshape(-1).data.cast("B") for one in arrays if one.size]


def _array(body: memoryview, offset: int, dtype: Any, count: int) -> Any:
    """Where it lies, if it lies as it must."""
    found = np.frombuffer(body, dtype=dtype, count=count, offset=offset) if count else np.zeros(0, dtype=dtype)
    return found if found.flags.aligned else found.copy()


def _ids(told: Any) -> Ids:
    if not isinstance(told, str) or len(told) > LOOKED_UP_MAX * 8 * 4 // 3 + 4:
        raise ProtocolError("a query for more ids than a query takes")
    try:
        content = base64.b64decode(told, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError("a query for what are no ids") from error
    if len(content) % 8:
        raise ProtocolError("a query for what are no ids")
    return np.frombuffer(content, dtype=np.uint64)


def _history(head: Head) -> str:
    value = head.get("history", "")
    if not isinstance(value, str) or len(value) > HISTORY_CHARACTERS_MAX:
        raise ProtocolError(f"history is {value!r:.40}")
    return value


def _whole(head: Head, name: str, most: int) -> int:
    value = head.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"{name} is {value!r:.40}")
    return value
