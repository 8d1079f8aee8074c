"""The shipped machine under thousands of schedules of failures: no promise is broken in any of them."""

from __future__ import annotations

import pytest

from holdfast.testing.simulator import Schedule, World, simulate

SCHEDULES = 12_000
CHUNKS = 12

# Seeds that once found a bug. 54, 280: a worker that slept through its eviction read sums of a later step.
# 901: a gradient that came before the last report was lost. 16335: a joiner started over with half a snapshot.
REGRESSIONS = (54, 280, 901, 1010, 1076, 2440, 16335)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_schedule_breaks_a_promise(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    steps = sum(simulate(seed).steps_committed for seed in range(chunk * count, (chunk + 1) * count))
    assert steps > count  # the schedules did train


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed(seed: int) -> None:
    world = simulate(seed)
    assert world.done and world.steps_committed == world.schedule.steps


def test_a_seed_replays_event_for_event() -> None:
    first, second = (simulate(7, keep_trace=True, faults=6) for _ in range(2))
    assert first.lines == second.lines
    assert first.lines and any("fault" in line for line in first.lines)


def test_without_faults_there_is_one_view_and_every_worker_finishes() -> None:
    world = simulate(3, workers=4, spares=0, faults=0, shards=5, steps=6)
    assert sorted(world.views) == [1]
    assert all(worker.state == 6 for worker in world.workers.values())


def test_faults_of_every_kind_are_drawn() -> None:
    seen: set[str] = set()
    for seed in range(60):
        world = simulate(seed, keep_trace=True, faults=6)
        assert world.lines is not None
        seen |= {line.split("fault: ")[1].split()[0] for line in world.lines if "fault: " in line}
    assert seen == {"crash", "stop", "reset", "cut", "agent", "join", "leave"}


def test_a_longer_run_with_many_faults() -> None:
    for seed in range(40):
        world = simulate(seed, workers=4, shards=8, steps=40, faults=25)
        assert world.done


def test_schedules_differ() -> None:
    assert len({Schedule.draw(seed) for seed in range(50)}) == 50
    assert isinstance(simulate(1), World)
