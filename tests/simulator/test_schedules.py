"""The shipped machine under thousands of schedules of failures: no promise is broken in any of them."""

from __future__ import annotations

import pytest

from tests.harness.simulator import Schedule, World, simulate
from tests.harness.simulator.faults import ANYWHERE, BETWEEN_HOSTS

SCHEDULES = 12_000
CHUNKS = 12

# Seeds of runs that fail if a bug that was once found comes back. 30: a worker that slept through its eviction reads
# sums of a later step. 97: a gradient that comes before the last report is lost. 92, 228: a registration whose answer
# was lost stands under a lease that nobody keeps alive. 592: a group that works is given up while the ledger is away.
# 1006: a worker that was left out is taken in again, by one that came later.
# 18: a member whose view cannot form waits for one that has given it up. 1692: a proposal is carried out much later.
REGRESSIONS = (18, 30, 92, 97, 228, 592, 1006, 1692)

# The same for schedules as they are drawn now. 22543: a member that was cut off registers again after the others went
# on, and is taken in while it still computes. 49064: one that joins as the others finish takes in whom they left out.
REGRESSIONS_AS_DRAWN = (22543, 49064)

# The same for scripts of several loops. 39: two joiners pass a loop and wait for each other for ever. 43: a joiner
# repeats what was done between two loops. 51: a script's lines change what a joiner reads.
REGRESSIONS_WITH_LOOPS = (39, 43, 51)


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=[pytest.mark.more] if chunk else []) for chunk in range(CHUNKS)]
)
def test_no_schedule_breaks_a_promise(chunk: int) -> None:
    count = SCHEDULES // CHUNKS
    steps = sum(simulate(seed).steps_committed for seed in range(chunk * count, (chunk + 1) * count))
    assert steps > count  # the schedules did train


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed(seed: int) -> None:
    world = simulate(seed, hangs=0, rewinds=0, loops=())  # as they were then
    assert world.done and world.steps_committed == world.schedule.steps


@pytest.mark.parametrize("seed", REGRESSIONS_AS_DRAWN)
def test_what_once_failed_as_it_is_drawn(seed: int) -> None:
    world = simulate(seed, loops=())
    assert world.done and world.steps_committed == world.schedule.steps


@pytest.mark.parametrize("seed", REGRESSIONS_WITH_LOOPS)
def test_what_once_failed_where_loops_end(seed: int) -> None:
    world = simulate(seed)
    assert world.schedule.loops and world.done and world.steps_committed == world.schedule.steps


def test_a_seed_replays_event_for_event() -> None:
    first, second = (simulate(7, keep_trace=True, faults=6) for _ in range(2))
    assert first.lines == second.lines
    assert first.lines and any("fault" in line for line in first.lines)


def test_without_faults_there_is_one_view_and_every_worker_finishes() -> None:
    world = simulate(3, workers=4, spares=0, faults=0, shards=5, steps=6, hangs=0, rewinds=0)
    assert sorted(world.views) == [1]
    assert all(worker.state == 6 for worker in world.workers.values())


def test_faults_of_every_kind_are_drawn() -> None:
    seen: set[str] = set()
    for seed in range(80):
        world = simulate(seed, keep_trace=True, faults=6, hosts=3, workers=4)
        assert world.lines is not None
        seen |= {line.split("fault: ")[1].split()[0] for line in world.lines if "fault: " in line}
    assert seen == {*ANYWHERE, *BETWEEN_HOSTS}


def test_a_longer_run_with_many_faults() -> None:
    for seed in range(40):
        world = simulate(seed, workers=4, shards=8, steps=40, faults=25)
        assert world.done


def test_a_longer_run_on_several_hosts_with_many_faults() -> None:
    for seed in range(30):
        world = simulate(seed, workers=6, hosts=3, shards=8, steps=60, faults=30)
        assert world.done


def test_schedules_differ() -> None:
    assert len({Schedule.draw(seed) for seed in range(50)}) == 50
    assert isinstance(simulate(1), World)
