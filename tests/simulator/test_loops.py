"""Scripts of several loops under thousands of schedules: nobody waits for ever, nothing between loops is done twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from holdfast.membership.loop_ends import LoopCount, Turn
from holdfast.membership.machine import Machine
from holdfast.membership.phases import Phase
from tests.harness.simulator import Violation, World, simulate
from tests.harness.simulator.script import Loop

SEEDS = 2500
Patch = pytest.MonkeyPatch
LOOPS = (Loop(2, lines_s=0.3), Loop(6, left_after=4, lines_s=1.0), Loop(3), Loop(12, lines_s=0.3))


def looped(seed: int, fault: str = "") -> World:
    """Many workers that come, leave and die while loops end."""
    return simulate(seed, workers=3 + seed % 3, steps=12, faults=8, loops=LOOPS, fault=fault)


def test_joiners_deaths_and_leaving_where_loops_end() -> None:
    for seed in range(60):
        world = looped(seed, ("", "join", "crash", "leave", "stop", "outage")[seed % 6])
        assert world.done and world.steps_committed == 12


def test_every_worker_runs_the_lines_between_the_loops_once() -> None:
    world = simulate(3, workers=4, spares=0, faults=0, shards=5, steps=12, loops=LOOPS, hangs=0, rewinds=0)
    assert all(worker.weights.lines == (0, 1, 2, 3) for worker in world.workers.values())
    assert all(worker.state == 12 for worker in world.workers.values())


def test_scripts_of_many_shapes_are_drawn() -> None:
    drawn = [world.schedule.loops for world in (simulate(seed, faults=0) for seed in range(80))]
    assert {len(loops) for loops in drawn} == {0, 1, 2, 3, 4}
    assert any(loop.left_after >= 0 for loops in drawn for loop in loops)
    assert any(one.until >= two.until for loops in drawn for one, two in itertools.pairwise(loops)), "empty"


# ---- rules broken one at a time


def joiners_wait_for_each_other(patch: Patch) -> None:
    """As it once was: at the end of every loop, also of one that it passes, a worker waits for all who have come."""

    def readers(self: Machine) -> tuple[str, ...]:
        plan = self.plan
        if self.phase is not Phase.COMPUTING or plan is None or plan.step != self.next:
            return ()
        gone = self._ready.get(plan.step, {}).keys() | self._lost.keys()
        return tuple(one for one in plan.fetches if one != self.me and one in self.ledger.ids - gone)

    real = LoopCount.turn

    def turn(self: LoopCount, *, over: bool) -> Turn:
        found = real(self, over=over)
        return Turn.END if found is Turn.PASS else found

    patch.setattr(Machine, "readers", readers)
    patch.setattr(LoopCount, "turn", turn)


def change_what_others_read(patch: Patch) -> None:
    """Nobody waits for those that read its state."""
    patch.setattr(Machine, "readers", lambda self: ())


def pass_no_loop(patch: Patch) -> None:
    """A joiner takes part in loops that were over before it came."""
    patch.setattr(LoopCount, "is_passing", property(lambda self: False))


def keep_what_the_lines_did(patch: Patch) -> None:
    """What a joiner's script does after a loop that it passes stays done."""
    real = LoopCount.leave
    patch.setattr(LoopCount, "leave", lambda self: real(self) and False)


def forget_what_is_passed(patch: Patch) -> None:
    """How many loops are in the state is not known to who gets it."""

    def leave(self: LoopCount) -> bool:
        self.passed += 1
        return False

    patch.setattr(LoopCount, "leave", leave)
    patch.setattr(LoopCount, "turn", lambda self, *, over: Turn.END if over else Turn.STEP)


@pytest.mark.parametrize(
    "patch",
    [
        joiners_wait_for_each_other,
        change_what_others_read,
        pass_no_loop,
        keep_what_the_lines_did,
        forget_what_is_passed,
    ],
    ids=lambda patch: patch.__name__,
)
def test_a_broken_rule_is_caught(patch: Callable[[Patch], None], monkeypatch: Patch) -> None:
    patch(monkeypatch)
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except Violation as violation:
            print(seed, str(violation).splitlines()[0])
            return
    raise AssertionError(f"{patch.__name__} passed {SEEDS} schedules")


def test_who_is_left_behind_at_the_end_of_a_loop_comes_back() -> None:
    """Its lines between two loops take it longer than the others, or it pauses there."""
    left = back = 0
    for seed in range(40):
        world = simulate(seed, late=True, pauses=5, faults=seed % 3, steps=12, loops=LOOPS, hangs=0, rewinds=0)
        assert world.done and world.steps_committed == 12
        left, back = left + world.books.left_behind, back + world.books.caught_up
    assert left and back
