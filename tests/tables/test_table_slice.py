"""A table's shard as a replicated state: replicas agree, whoever joins later too; nothing odd gets in."""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import DivergedError, ProtocolError
from holdfast.servers.replicated import Answer, Author, Payload, ReplicatedState
from holdfast.tables.serving import TABLE as KIND
from holdfast.tables.serving import kinds_with_disk
from holdfast.tables.settings import Adam, Expire, TableSettings
from holdfast.tables.shard import TableShard
from holdfast.tables.table_slice import (
    TableSlice,
    changes_query,
    create_head,
    decode_changes,
    fill_of,
    look_up_query,
    update_of,
)
from holdfast.tables.unit_ranges import RANGES_MAX, UnitRanges, covers, decode_ranges, with_unit

TABLE = TableSettings(dim=3, optimizer=Adam(lr=0.1), admit=2, expire=Expire(rows=10))
ME = Author("w0", 1, 1)


def sent(answer: Answer) -> Payload:
    """As it comes out of a socket: in memory of its own."""
    return Payload(dict(answer.head), memoryview(b"".join(bytes(view) for view in answer.views)))


def created() -> TableSlice:
    state: ReplicatedState = TableSlice()
    state.apply(ME, Payload(create_head(TABLE), memoryview(b"")))
    assert isinstance(state, TableSlice)
    return state


def updates(seed: int, count: int) -> list[Payload]:
    draws = np.random.default_rng(seed)
    found = []
    for number in range(count):
        ids = draws.integers(0, 20, 8).astype(np.uint64)
        gradients = draws.standard_normal((8, 3)).astype(np.float32)
        times = None if number % 2 else np.full(8, 2, dtype=np.uint32)
        found.append(sent(update_of(ids, gradients, times, lr=0.1, time=number)))
    return found


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 15), joins_at=st.integers(0, 15))
def test_replicas_agree_and_one_that_joins_later_too(seed: int, count: int, joins_at: int) -> None:
    one, other, late = created(), created(), TableSlice()
    for number, payload in enumerate(updates(seed, count)):
        if number == joins_at % count:
            late.restore(sent(one.capture()))
        one.check(ME, payload)
        for state in (one, other) if number < joins_at % count else (one, other, late):
            state.apply(ME, payload)
    late.forget("w0", 1)
    assert one.digest() == other.digest() == late.digest() and one.version == late.version == count
    query = look_up_query(np.arange(30, dtype=np.uint64))
    answers = [state.read(query) for state in (one, other, late)]
    assert len({bytes(answer.views[0]) for answer in answers if answer is not None}) == 1


def of_unit(unit: int, seed: int) -> Payload:
    gradients = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
    return sent(update_of(np.arange(4, dtype=np.uint64), gradients, None, lr=0.1, time=0, unit=unit))


def test_a_unit_that_is_made_again_changes_rows_once_also_where_they_came_from_a_checkpoint() -> None:
    state = created()
    for number, unit in enumerate((0, 1, 4, 2)):
        state.apply(ME, of_unit(unit, number))
    before = state.digest()
    for unit in (4, 0, 2):
        state.check(ME, of_unit(unit, 77))
        state.apply(Author("w1", 2, 1), of_unit(unit, 77))
    assert state.digest() == before and state.version == 4
    joined, checkpointed = TableSlice(), created()
    joined.restore(sent(state.capture()))
    answer = state.read(changes_query(0))
    assert answer is not None
    taken = decode_changes(answer.head, sent(answer).body, TABLE)
    for piece in fill_of(taken, 2, "some history"):
        checkpointed.apply(ME, sent(piece))
    for other in (state, joined, checkpointed):
        other.apply(ME, of_unit(1, 77))
        assert other.digest() == before
        other.apply(ME, of_unit(3, 5))
    assert state.digest() == joined.digest() == checkpointed.digest() != before


@given(units=st.lists(st.integers(0, 30)))
def test_ranges_say_which_units_there_were(units: list[int]) -> None:
    ranges: UnitRanges = ()
    for unit in units:
        ranges = with_unit(ranges, unit)
    assert [unit for unit in range(32) if covers(ranges, unit)] == sorted(set(units))
    assert decode_ranges([list(one) for one in ranges]) == ranges
    assert all(before[1] < after[0] for before, after in pairwise(ranges)), "as few as can be"


def test_of_many_ranges_the_oldest_are_forgotten() -> None:
    ranges: UnitRanges = ()
    for unit in range(0, 2 * RANGES_MAX + 6, 2):
        ranges = with_unit(ranges, unit)
    assert len(ranges) == RANGES_MAX and not covers(ranges, 4) and covers(ranges, 6)


@pytest.mark.parametrize("told", [None, [1], [[2, 1]], [[1, 2], [2, 3]], [[-1, 2]], [[0, 1.5]], [["a", "b"]]], ids=str)
def test_units_that_no_shard_has(told: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_ranges(told)


def test_the_shards_of_a_server_share_its_memory_and_leave_nothing_of_an_earlier_process(tmp_path: Path) -> None:
    left = tmp_path / "rows" / "cold-rows-left.sqlite3"
    left.parent.mkdir()
    left.write_bytes(b"x")
    table = TableSettings(dim=3)
    kinds = kinds_with_disk(tmp_path / "rows", 80)
    assert not left.exists()
    shards, twins = [kinds[KIND](), kinds[KIND]()], [TableSlice(), TableSlice()]
    for state in (*shards, *twins):
        state.apply(ME, Payload(create_head(table), memoryview(b"")))
    for start in range(0, 400, 20):
        ids = np.arange(start, start + 20, dtype=np.uint64)
        payload = sent(update_of(ids, np.ones((20, 3), dtype=np.float32), None, lr=0.1, time=0))
        for state in (*shards, *twins):
            state.apply(ME, payload)
    held = [state._shard for state in shards if isinstance(state, TableSlice)]
    assert all(one is not None and one.cold is not None and len(one.cold) >= 400 - 40 for one in held)
    moved = kinds[KIND]()
    moved.restore(sent(shards[0].capture()))
    assert {state.digest() for state in (*shards, *twins, moved)} == {twins[0].digest()}
    assert isinstance(moved, TableSlice) and moved._shard is not None and moved._shard.cold is not None
    assert len(moved._shard.cold) >= 400 - 27, "three have it now"


def test_changes_are_what_the_shard_says() -> None:
    state, twin = created(), TableShard(TABLE)
    for number, payload in enumerate(updates(3, 9)):
        state.apply(ME, payload)
        if number % 4 == 3:
            answer = state.read(changes_query(twin.updates))
            assert answer is not None
            payload = sent(answer)
            twin.apply_changes(decode_changes(payload.head, payload.body, TABLE))
            assert twin.digest() == state.digest()


def test_before_it_is_created_there_is_nothing_and_it_is_created_once() -> None:
    state = TableSlice()
    answer = state.read({"kind": "moment"})
    assert answer is not None and answer.head["created"] is False
    with pytest.raises(ProtocolError, match="not created yet"):
        state.check(ME, updates(1, 1)[0])
    empty = TableSlice()
    empty.restore(sent(state.capture()))
    assert empty.digest() == state.digest()
    state = created()
    state.check(ME, Payload(create_head(TABLE), memoryview(b"")))
    other = TableSettings(dim=4)
    with pytest.raises(ProtocolError, match="other settings"):
        state.check(ME, Payload(create_head(other), memoryview(b"")))


def test_what_is_not_finite_is_refused_before_it_is_in_the_log() -> None:
    state = created()
    wrong = update_of(np.zeros(1, dtype=np.uint64), np.full((1, 3), np.nan, dtype=np.float32), None, lr=0.1, time=0)
    with pytest.raises(DivergedError, match=r"w0\.1"):
        state.check(ME, sent(wrong))
    state.check(ME, Payload({"kind": "skip"}, memoryview(b"")))
    state.apply(ME, Payload({"kind": "skip"}, memoryview(b"")))
    assert state.version == 0


GOOD = {"kind": "update", "count": 1, "lr": 0.1, "time": 0, "times": False}


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"kind": "drop"},
        {**GOOD, "count": 2},
        {**GOOD, "count": -1},
        {**GOOD, "count": True},
        {**GOOD, "lr": float("nan")},
        {**GOOD, "lr": "fast"},
        {**GOOD, "time": -1},
        {**GOOD, "times": 1},
        {**GOOD, "unit": None},
        {**GOOD, "unit": -1},
        {"kind": "create", "settings": {"dim": 3}},
        {"kind": "create", "settings": None},
    ],
    ids=str,
)
def test_updates_that_no_table_sends(head: dict[str, Any]) -> None:
    state = created()
    state.check(ME, Payload(GOOD, memoryview(bytes(20))))
    with pytest.raises(ProtocolError):
        state.check(ME, Payload(head, memoryview(bytes(20))))


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"kind": "everything"},
        {"kind": "look up"},
        {"kind": "look up", "ids": "*"},
        {"kind": "look up", "ids": base64.b64encode(bytes(7)).decode()},
        {"kind": "look up", "ids": "A" * (4 << 20)},
        {"kind": "changes", "since": -1},
        {"kind": "changes", "since": "0"},
    ],
    ids=lambda query: str(query)[:40],
)
def test_queries_that_no_table_asks(query: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        created().read(query)


def test_a_snapshot_of_something_else_is_not_taken() -> None:
    state = created()
    state.apply(ME, updates(1, 1)[0])
    good = sent(state.capture())
    for name, wrong in (("records", 7), ("candidates", -1), ("moment", {}), ("settings", {}), ("since", 3)):
        with pytest.raises(ProtocolError):
            TableSlice().restore(Payload({**good.head, name: wrong}, good.body))
