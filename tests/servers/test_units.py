"""The table of units: every unit is used once where nobody dies, and what the dead leave is given out again."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.servers.replicated import Author, Payload
from holdfast.servers.units import Ask, Extras, UnitTable
from holdfast.servers.units_port import MemoryUnits, SharedTable
from holdfast.servers.units_state import (
    UnitsState,
    answer_query,
    ask_head,
    begin_head,
    bring_head,
    extras_query,
    standing_query,
    used_head,
    wish_head,
)

NOTHING = memoryview(b"")


@given(seed=st.integers(0, 10**6), workers=st.integers(1, 4), units=st.integers(0, 12))
def test_every_unit_is_used_and_what_the_dead_hold_is_given_out_again(seed: int, workers: int, units: int) -> None:
    random, table = Random(seed), UnitTable()
    table.begin(0)
    used: Counter[int] = Counter()
    sequences = {f"w{number}": 0 for number in range(workers)}
    incarnations = dict.fromkeys(sequences, 1)
    asked: dict[str, bool] = dict.fromkeys(sequences, False)
    holds: dict[str, list[int]] = {worker: [] for worker in sequences}
    over: set[str] = set()
    for _ in range(2000):
        if len(over) == workers:
            break
        worker = random.choice([one for one in sequences if one not in over])
        if random.random() < 0.05:
            table.forget(worker, incarnations[worker])
            incarnations[worker] += 1
            asked[worker], holds[worker] = False, []
        elif asked[worker] and (given_ := table.answer(worker, sequences[worker])) is not None:
            asked[worker] = False
            if given_.unit is None:
                over.add(worker)
                assert not any(holds.values()), "somebody was told that all is done while units are held"
            else:
                holds[worker].append(given_.unit)
        elif holds[worker] and random.random() < 0.5:
            unit = holds[worker].pop(0)
            table.used(worker, incarnations[worker], unit)
            used[unit] += 1
        elif not asked[worker] and len(holds[worker]) < 2:
            sequences[worker] += 1
            table.ask(worker, incarnations[worker], Ask(sequences[worker], units, 0, sequences[worker] - 1))
            asked[worker] = True
    assert len(over) == workers, "nobody got to the end"
    assert used == Counter(range(units))


def test_what_is_left_in_a_state_follows_from_the_clocks_of_that_state() -> None:
    table = UnitTable()
    table.begin(0)
    for clock in range(3):
        table.ask("w0", 1, Ask(clock + 1, 100, clock, clock))
        if clock < 2:
            table.used("w0", 1, clock)
    assert table.left_at({"w0": 2}) == [2]
    assert table.left_at({"w0": 1}) == [1, 2], "what was used after the state was taken is not in it"
    assert table.left_at({"w0": 3}) == [], "an update that is in, and was not told of yet"
    assert table.left_at({}) == [2], "a worker that is gone had told of what is in"
    table.forget("w0", 1)
    assert table.left_at({"w0": 1}) == [1, 2], "it left after the state was captured, before it was asked what is in"
    assert table.left_at({}) == [2]


def test_an_ask_that_replaces_one_that_was_answered_has_its_answer() -> None:
    table = UnitTable()
    table.begin(0)
    table.ask("w0", 1, Ask(1, 10, clock=3))
    table.ask("w0", 1, Ask(2, 10, clock=5, seen=0))
    given_ = table.answer("w0", 2)
    assert given_ is not None
    assert given_.unit == 0
    assert table.next == 1
    assert table.rows["w0"].held == {0: 5}


def test_nobody_is_answered_before_the_run_has_begun() -> None:
    units = MemoryUnits(SharedTable(), "w0")
    units.ask(5, 0)
    assert units.answer() is None
    units.begin(3, [1])
    given_ = units.answer()
    assert given_ is not None
    assert given_.unit == 1, "what is left comes first"


def test_replicas_that_apply_the_same_have_the_same_and_a_restored_one_goes_on() -> None:
    one, two = UnitsState(), UnitsState()
    updates = [begin_head(0, []), ask_head(5, 0, 0), used_head(0), ask_head(5, 1, 2), wish_head()]
    updates.append(bring_head(Extras(1, 7, "text")))
    for sequence, head in enumerate(updates, 1):
        for state in (one, two):
            payload = Payload(head, NOTHING)
            state.check(Author("w0", 1, sequence), payload)
            state.apply(Author("w0", 1, sequence), payload)
    assert one.digest() == two.digest()
    three = UnitsState()
    three.restore(Payload(one.capture().head, NOTHING))
    assert three.digest() == one.digest()
    answer = three.read(answer_query("w0", 4))
    assert answer is not None
    assert answer.head["unit"] == 1
    assert three.read(extras_query(2)) is None, "nobody has met that wish"
    standing = three.read(standing_query({"w0": 1}))
    assert standing is not None
    assert standing.head["left"] == [1]


@pytest.mark.parametrize(
    "head", [{}, {"used": -1}, {"ask": {"until": 1}}, {"begin": {"unit": 0, "left": "x"}}, {"other": 1}, {"bring": {}}]
)
def test_what_no_worker_would_send_is_refused(head: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        UnitsState().check(Author("w0", 1, 1), Payload(head, NOTHING))
