"""The bound on staleness counts by position in the data: kept whoever dies or comes, and no reason to wait for ever."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.servers.replicated import Author, Payload
from holdfast.servers.units import Ask, UnitTable, may_begin, rounds_ahead
from holdfast.servers.units_state import UnitsState, answer_query, ask_head, begin_head, used_head

NOTHING = memoryview(b"")


@given(
    unit=st.integers(0, 10**6),
    first=st.integers(0, 10**6),
    workers=st.integers(1, 64),
    staleness=st.integers(0, 50),
)
def test_a_unit_may_begin_when_all_before_its_round_less_the_bound_are_finished(
    unit: int, first: int, workers: int, staleness: int
) -> None:
    """The two ways to say it are one: rounds apart, and the units that must be finished."""
    needed = (unit // workers - staleness) * workers
    assert may_begin(unit, first, workers, staleness) == (first >= needed)
    assert may_begin(first, first, workers, staleness), "the first unfinished one may always begin"
    assert may_begin(unit, first, workers, None)


@pytest.mark.parametrize(("unit", "ahead"), [(12, 0), (15, 0), (16, 1), (31, 4), (32, 5)])
def test_rounds_are_as_long_as_there_are_workers(unit: int, ahead: int) -> None:
    assert rounds_ahead(unit, first=13, workers=4) == ahead


class Crew:
    """Workers on one table, with books of their own on what is finished and who is there."""

    def __init__(self, seed: int, workers: int, units: int, staleness: int | None) -> None:
        self.random, self.table, self.units, self.staleness = Random(seed), UnitTable(), units, staleness
        self.table.begin(0)
        self.incarnations = {f"w{number}": 1 for number in range(workers)}
        self.sequences = dict.fromkeys(self.incarnations, 0)
        self.present: set[str] = set()
        self.finished: set[int] = set()
        self.holds: dict[str, list[int]] = {worker: [] for worker in self.incarnations}
        self.over: set[str] = set()

    def act(self) -> None:
        worker = self.random.choice(sorted(self.incarnations.keys() - self.over))
        before = {unit for held in self.holds.values() for unit in held}
        if self.random.random() < 0.05:
            self.table.forget(worker, self.incarnations[worker])
            self.present.discard(worker)
            self.incarnations[worker] += 1
        elif self.holds[worker] and self.random.random() < 0.6:
            unit = self.random.choice(self.holds[worker])
            self.finished.add(unit)
            self.table.used(worker, self.incarnations[worker], unit)
        elif len(self.holds[worker]) < 2 and worker not in self.table.waiting:
            self.sequences[worker] += 1
            self.present.add(worker)
            ask = Ask(self.sequences[worker], self.units, 0, self.sequences[worker] - 1, self.staleness)
            self.table.ask(worker, self.incarnations[worker], ask)
        self.holds = {name: sorted(row.held) for name, row in self.table.rows.items()} | {
            name: [] for name in self.incarnations if name not in self.table.rows
        }
        self._look(before)
        answer = self.table.answer(worker, self.sequences[worker])
        if answer is not None and answer.is_over:
            self.over.add(worker)

    def _look(self, before: set[int]) -> None:
        """At what was handed out by this."""
        workers = len(self.present)
        for unit in {unit for held in self.holds.values() for unit in held} - before:
            assert unit not in self.finished, "a finished unit was given out again"
            if self.staleness is not None:
                needed = range(max(0, (unit // workers - self.staleness) * workers))
                assert self.finished.issuperset(needed), f"unit {unit} of {workers} workers began too early"


@given(
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 5),
    units=st.integers(0, 25),
    staleness=st.one_of(st.none(), st.integers(0, 3)),
)
def test_the_bound_holds_whoever_dies_and_comes_and_all_get_to_the_end(
    seed: int, workers: int, units: int, staleness: int | None
) -> None:
    crew = Crew(seed, workers, units, staleness)
    for _ in range(5000):
        if len(crew.over) == workers:
            break
        crew.act()
    assert len(crew.over) == workers, "somebody waits for ever"
    assert crew.finished == set(range(units))


def time_for(units: int, paces_s: list[float], staleness: int | None) -> float:
    """How long so many units take workers of these paces, in virtual time: each asks, computes, says so."""
    table, now, sequences = UnitTable(), 0.0, [0] * len(paces_s)
    table.begin(0)
    computing: list[tuple[float, int, int]] = []
    idle = set(range(len(paces_s)))
    for number in idle:
        sequences[number] += 1
        table.ask(f"w{number}", 1, Ask(sequences[number], units, 0, 0, staleness))
    while True:
        for number in sorted(idle):
            answer = table.answer(f"w{number}", sequences[number])
            if answer is not None and answer.unit is not None:
                idle.discard(number)
                heapq.heappush(computing, (now + paces_s[number], number, answer.unit))
        if not computing:
            return now
        now, number, unit = heapq.heappop(computing)
        table.used(f"w{number}", 1, unit)
        sequences[number] += 1
        table.ask(f"w{number}", 1, Ask(sequences[number], units, 0, sequences[number] - 1, staleness))
        idle.add(number)


def test_a_worker_that_is_slow_for_good_sets_the_pace_only_of_those_k_rounds_ahead() -> None:
    """4 workers, one 5 times slower: 400 units are 125 s of work for 3.2 workers, and 500 s in lock step."""
    paces_s = [1.0, 1.0, 1.0, 5.0]
    assert time_for(400, paces_s, None) == pytest.approx(125, abs=6)
    assert time_for(400, paces_s, 4) == pytest.approx(125, abs=6), "within the bound nobody waits for it"
    assert 200 < time_for(400, paces_s, 1) < 300, "7 units at most while it computes one, and that in 5 s"
    assert time_for(400, paces_s, 0) == pytest.approx(500, abs=6), "4 units a round, and that in 5 s"


@given(workers=st.integers(2, 8), staleness=st.integers(1, 6))
def test_who_is_k_times_slower_holds_nobody_back(workers: int, staleness: int) -> None:
    paces_s = [1.0] * (workers - 1) + [float(staleness)]
    assert time_for(100, paces_s, staleness) <= time_for(100, paces_s, None) + staleness


def test_a_lost_worker_is_not_counted_and_its_unit_comes_first() -> None:
    table = UnitTable()
    table.begin(0)
    for worker in ("w0", "w1"):
        table.ask(worker, 1, Ask(1, 10, 0, staleness=0))
    table.used("w0", 1, 0)
    table.ask("w0", 1, Ask(2, 10, 1, 1, staleness=0))
    assert table.answer("w0", 2) is None, "unit 2 is of the next round, and unit 1 is not finished"
    assert table.waits_for("w0") == "step 1, which w1 has"
    assert table.workers == 2
    table.forget("w1", 1)
    assert table.workers == 1
    given_ = table.answer("w0", 2)
    assert given_ is not None
    assert (given_.unit, given_.finished) == (1, 1)


def test_the_bound_is_in_the_replicated_state_and_its_copies() -> None:
    one, two = UnitsState(), UnitsState()
    heads = [begin_head(0, []), ask_head(9, 0, 0, 0), used_head(0), ask_head(9, 1, 2, 0)]
    for sequence, head in enumerate(heads, 1):
        one.apply(Author("w0", 1, sequence), Payload(head, NOTHING))
    one.apply(Author("w1", 1, 1), Payload(ask_head(9, 0, 0, 0), NOTHING))
    assert one.read(answer_query("w1", 1)) is None, "unit 2 of two workers must wait for unit 1"
    assert one.waits_for(answer_query("w1", 1)) == "step 1, which w0 has"
    two.restore(Payload(one.capture().head, NOTHING))
    assert two.digest() == one.digest()
    for state in (one, two):
        state.apply(Author("w0", 1, 5), Payload(used_head(1), NOTHING))
        answer = state.read(answer_query("w1", 1))
        assert answer is not None
        assert answer.head == {"unit": 2, "wish": 0, "ahead": 0, "finished": 2}
    assert two.digest() == one.digest()
