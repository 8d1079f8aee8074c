"""The runtime that ships, under schedules of failures in virtual time: the same bits, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine import building
from tests.harness.runtime import Loop, Schedule, Script, World, simulate
from tests.harness.runtime.faults import ANYWHERE, BETWEEN_HOSTS
from tests.simulator.test_mutants import DoesNotKnockAtTheDoor

SCHEDULES = 1200
CHUNKS = 12

# Seeds of runs that fail if a bug that was once found comes back. 1093: a worker is given the mean of a step in a view
# with a joiner, which was never in that step, and refuses to record without it. 1389: one that has recorded by itself,
# as all others were lost to it, says nothing of it to those who come to the same line in the next view. 1552: one that
# was left behind records before it is in a view again.
# 4478: a joiner is given a step by one member in the lines after a loop and by one before them, and was turned away.
REGRESSIONS = (1093, 1389, 1552, 4478)
AS_THEN = {"network": "quick", "ambushes": 0.0, "in_steps": False, "shards_take": 1.0}  # rougher schedules came later

# As 1093, but the joiner came in a view in which the mean was not given yet: it was in the next one.
CAME_BEFORE = 1006688

# A joiner that is stopped before it asks for the state, and asks when its lease is gone and the others are in the lines
# after their loop: it was given what these lines had made of the state, and ran them once more.
ASKS_TOO_LATE = (2528, 6160, 6318)

TWO_LOOPS = Script((Loop(3, lines_s=0.3, evaluates=True), Loop(9, left_after=6, records=True), Loop(12)))


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.more] if chunk else []) for chunk in range(CHUNKS)]
)
def test_no_schedule_breaks_a_promise(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    steps = sum(simulate(seed).books.steps_applied for seed in range(chunk * count, (chunk + 1) * count))
    assert steps > 5 * count  # the schedules did train


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed(seed: int) -> None:
    assert simulate(seed, **AS_THEN).books.finishers


def test_nobody_waits_for_one_that_came_with_a_later_state_in_a_view_before() -> None:
    assert simulate(CAME_BEFORE).books.finishers


@pytest.mark.parametrize("seed", ASKS_TOO_LATE)
def test_a_state_that_has_changed_is_not_given_to_who_asks_too_late(seed: int) -> None:
    assert simulate(seed).books.finishers


def stopped(seed: int, who: str, **changes: Any) -> World:
    """A run whose script stops: all workers call run.stop, or only the leader. Connections break, and joiners come."""
    drawn = Schedule.draw(seed)
    at = seed % drawn.script.steps
    stops_after, leaders = (at, -1) if who == "all" else (-1, at)
    script = replace(drawn.script, stops_after=stops_after, leader_stops_after=leaders)
    changes = {"workers": max(2, drawn.workers), "faults": 6, "ambushes": 0.7, **changes}
    return simulate(seed, script=script, **changes)


@pytest.mark.parametrize("who", ["all", "leader"])
@pytest.mark.parametrize("fault", ["", "reset"])
def test_all_stop_before_the_same_step_whatever_breaks(who: str, fault: str) -> None:
    for seed in range(16):
        assert stopped(seed, who, fault=fault).books.finishers


def test_one_that_is_given_a_mean_does_not_wait_for_a_joiner_in_its_lines() -> None:
    """Seed 152: the joiner has a later state, and waits to hear whether that one wants to stop."""
    assert stopped(152, "all", fault="reset").books.finishers


def test_one_that_is_taken_in_again_while_it_is_in_its_lines_is_given_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 117: it was left out for a moment, and the others are a step ahead when its loop comes back.

    Whoever was left out rests for a while before it is tried again, which makes this rare: so here it does not.
    """
    monkeypatch.setattr(building, "Machine", DoesNotKnockAtTheDoor)
    cut = {"hosts": 2, "workers": 4, "path": "hosts", "fault": "partition", "faults": 6, "in_steps": True}
    assert simulate(117, save_every=0, **cut).books.finishers


def test_a_seed_replays_event_for_event() -> None:
    first, second = (simulate(7, keep_trace=True, faults=6) for _ in range(2))
    assert first.lines == second.lines
    assert first.lines and any("fault" in line for line in first.lines)


def test_without_faults_every_worker_finishes_and_nobody_is_evicted() -> None:
    world = simulate(3, workers=4, spares=0, faults=0, hosts=1, script=TWO_LOOPS)
    assert world.books.finishers == 4 and not any(kind == "evicted" for _, kind in world.kinds)


def test_scripts_of_many_shapes_are_drawn() -> None:
    scripts = [Schedule.draw(seed).script for seed in range(200)]
    loops = [loop for script in scripts for loop in script.loops]
    assert {len(script.loops) for script in scripts} == {1, 2, 3, 4}
    assert any(loop.left_after >= 0 for loop in loops) and any(loop.evaluates for loop in loops)
    assert any(loop.records for loop in loops) and any(script.evaluates_every for script in scripts)
    assert any(script.stops_after >= 0 for script in scripts) and any(script.evaluates_first for script in scripts)


def test_faults_of_every_kind_are_drawn() -> None:
    seen: set[str] = set()
    for seed in range(40):
        world = simulate(seed, keep_trace=True, faults=8, hosts=2, workers=3, path="hosts")
        assert world.lines is not None
        seen |= {line.split("fault: ")[1].split()[0] for line in world.lines if "fault: " in line}
    assert seen == {*ANYWHERE, *BETWEEN_HOSTS}


@pytest.mark.parametrize("options", [{"path": "network"}, {"path": "hosts"}, {"late_s": 0.5}, {"save_every": 1}])
def test_many_faults_where_loops_end(options: dict[str, Any]) -> None:
    for seed in range(8):
        world = simulate(
            seed, **{"hosts": 1, "workers": 4, "faults": 8, "script": TWO_LOOPS, "path": "host", **options}
        )
        assert world.books.finishers
