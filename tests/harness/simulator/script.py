"""The script of a simulated process: loops over steps, `break`, empty loops, and lines between them that take time and
change the state.

Which loops a worker passes, for whom it waits at the end of one and who saves there is decided by what ships
(membership/loop_ends.py and the machine). What engine/api/run.py and engine/between_loops.py do with that is done here
in the same order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.membership import messages as m
from holdfast.membership.loop_ends import LoopCount, Turn

if TYPE_CHECKING:
    from tests.harness.simulator.weights import Weights
    from tests.harness.simulator.worker import Worker


@dataclass(frozen=True)
class Loop:
    until: int
    left_after: int = -1  # the step after which it is left with `break`
    lines_s: float = 0.0  # what follows it takes a worker up to so long


def draw_loops(seed: int, steps: int) -> tuple[Loop, ...]:
    """Of a run with so many steps. The last loop is never left early: the run has all of them."""
    rng = random.Random(f"script {seed}")
    if rng.random() < 0.4:
        return ()
    ends = sorted(rng.randrange(steps + 1) for _ in range(rng.choice((0, 1, 2, 3))))
    loops, start = [], 0
    for end in ends:
        left = rng.randrange(start, end) if end > start and rng.random() < 0.3 else -1
        loops.append(Loop(end, left, rng.choice((0.0, 0.0, 0.1, 2.0))))
        start = end if left < 0 else left + 1
    return (*loops, Loop(steps, lines_s=rng.choice((0.0, 0.0, 1.0))))


class Script:
    def __init__(self, worker: Worker, loops: tuple[Loop, ...]) -> None:
        self._worker = worker
        self._loops = loops
        self.count = LoopCount()
        self._ending: m.Compute | None = None  # at the end of a loop, while others read this worker's state
        self._arrived: Weights | None = None  # the state that it came with, while it passes loops
        self.rng = random.Random(f"lines of {worker.id} {worker.world.schedule.seed}")

    @property
    def waits(self) -> bool:
        return self._ending is not None

    def handed(self, effect: m.Compute) -> None:
        """The loop asks for its next step, and gets this one."""
        turn = self.count.turn(over=effect.step >= self._loops[self.count.passed].until)
        if turn is Turn.AHEAD:
            self._worker.world.ended(self._worker, m.End("evicted", "its script is ahead of its state"))
        elif turn is Turn.STEP:
            self._worker.compute(effect)
        elif turn is Turn.PASS:
            self._leave(effect)
        else:
            self._ending = effect
            self.look()

    def look(self) -> None:
        """Something has come: is the end of the loop over?"""
        effect, worker = self._ending, self._worker
        if effect is None or worker.busy or worker.stopped or not worker.alive or worker.machine.readers():
            return
        self._ending = None
        keepers = worker.machine.keepers()
        if worker.world.schedule.save_every and worker.id in keepers and not worker.saving:
            worker.world.storage.save(worker, m.Save(effect.step, keepers))
        self._leave(effect)

    def _leave(self, effect: m.Compute) -> None:
        """The loop is over: the lines after it, then the next loop, which is handed the same step."""
        number, worker = self.count.passed, self._worker
        if self.count.leave():
            self._arrived = worker.weights.copy()
        worker.weights.loops = self.count.done

        def then() -> None:
            worker.weights.lines += (number,)
            if self.count.passed == len(self._loops):
                worker.world.finish(worker)
                return
            if self._arrived is not None:
                worker.weights.fetch(self._arrived)
                self._arrived = None
            self.handed(effect)

        worker.work(self.rng.uniform(0.0, self._loops[number].lines_s), then)

    def applied(self, step: int) -> m.Event | None:
        """The script's lines for a step are done. With `break` they go on with those after the loop."""
        number, worker = self.count.passed, self._worker
        if self._loops[number].left_after != step:
            return m.Applied(step)
        self.count.leave()
        worker.weights.loops = self.count.done

        def then() -> m.Event:
            worker.weights.lines += (number,)
            return m.Applied(step)

        worker.work(self.rng.uniform(0.0, self._loops[number].lines_s), then)
        return None

    def has_state(self) -> None:
        """The state has come from a peer or from storage, and says which loops are in it."""
        self.count.done = self._worker.weights.loops
