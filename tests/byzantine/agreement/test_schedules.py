"""The machine that ships under thousands of schedules of failures and lies: no promise is broken in any of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.byzantine.agreement.misbehaving import KINDS as LIARS
from tests.harness.agreement_simulator import Schedule, Violation, simulate
from tests.harness.agreement_simulator.faults import KINDS

SCHEDULES = 2000
CHUNKS = 4
# Schedules that fail if a bug that was once found comes back. 58: a server with nothing to say was not told that the
# others had gone on. 630: a model was dropped before its record was made, and nobody had it any more. 1678: a server
# that had seen a round decided asked for its updates only, which the others had dropped with the round.
REGRESSIONS: tuple[tuple[int, dict[str, Any]], ...] = ((58, {}), (630, {}), (1678, {}))


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.more] if chunk else []) for chunk in range(CHUNKS)]
)
def test_no_schedule_breaks_a_promise(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    records = later = 0
    for seed in range(chunk * count, (chunk + 1) * count):
        books = simulate(seed).books
        records, later = records + books.published, later + books.later_views
    assert records > 4 * count and later > count // 20  # the schedules did agree, and did change views


@pytest.mark.parametrize(("seed", "changes"), REGRESSIONS)
def test_what_once_failed(seed: int, changes: dict[str, Any]) -> None:
    simulate(seed, **changes)


def test_a_seed_replays_event_for_event() -> None:
    first, second = (simulate(7, keep_trace=True, faults=6) for _ in range(2))
    assert first.lines == second.lines
    assert first.lines and any("fault" in line for line in first.lines)


def test_without_faults_each_round_is_decided_by_its_first_leader() -> None:
    world = simulate(3, f=1, faults=0, loss=0.0, doubling=0.0, liars=(), clients=("honest",) * 4, rounds=3)
    assert world.books.later_views == 0 and world.books.published == 12


def test_a_client_that_signs_two_updates_is_dropped_with_the_proof() -> None:
    found = 0
    for seed in range(10):
        world = simulate(seed, f=1, faults=0, loss=0.0, liars=(), clients=("honest", "honest", "twofold"), rounds=2)
        record = next(iter(world.servers.values())).disk.records[0]
        for one, two in world.checker.contents(record.value).dropped:
            assert (one.client, one.round) == (two.client, two.round) and one.digest != two.digest
            assert not world.checker.claim(one) and not world.checker.claim(two)
            found += 1
    assert found >= 8


# Two values, a wrong set or model: no mere standstill, and nothing that raises.
BROKEN = r"sees another value|is not what its set comes to|and another has|and the servers have|leaves out"


@pytest.mark.parametrize("liars", [("equivocating", "voting"), ("lying", "lying")])
def test_one_liar_too_many_breaks_a_promise(liars: tuple[str, ...]) -> None:
    """With f+1 of them the checker sees it: so it can fail."""
    for seed in range(200):
        try:
            simulate(seed, f=1, liars=liars, clients=("honest",) * 3, rounds=3, faults=2)
        except Violation as violation:
            if re.search(BROKEN, str(violation).splitlines()[0]):
                return
    pytest.fail(f"{liars} broke nothing")


def test_faults_and_liars_of_every_kind_are_drawn() -> None:
    seen: set[str] = set()
    for seed in range(60):
        world = simulate(seed, keep_trace=True, faults=6)
        assert world.lines is not None
        seen |= {line.split("fault: ")[1].split()[0] for line in world.lines if "fault: " in line}
    assert seen == {*KINDS, "isolates"}
    assert {kind for seed in range(200) for kind in Schedule.draw(seed).liars} == set(LIARS)
