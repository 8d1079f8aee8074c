"""Simulated speeds that change for good, and whether the shards follow them: soon, and not for every breath of wind."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.membership.balance import divide, expected_s
from tests.harness.simulator.schedule import Violation

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World

CALM = 0.1  # up to this much noise, paces are told from it
MOVES, STEPS_PER_MOVE = 7, 6  # so often shards may move since a pace has changed, and once more in so many steps
SETTLED_STEPS = 12
WORST = 1.4  # times the best that could be, once it is settled
WORSE_STEPS = 6  # an idle worker is tried again now and then, which costs a few steps if it is still slow


class Pacing:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"paces of {world.schedule.seed}")
        self._changes = 0
        self._since: dict[str, tuple[int, int, int, int]] = {}  # view, changes, steps since, moves before
        self._worse: dict[str, int] = {}  # for how many steps
        self.moves = 0

    def start(self) -> None:
        schedule = self._world.schedule
        for _ in range(schedule.slowed):
            self._world.after(self._rng.uniform(2.0, 3.0 + schedule.steps * 0.4), self._change)

    def _change(self) -> None:
        living = self._world.living()
        if living and not self._world.done:
            worker = self._rng.choice(living)
            worker.speed = self._rng.choice((0.05, 0.1, 0.5))
            self._changes += 1
            self._world.trace("pace:", worker.id, worker.speed)

    def applied(self, worker: Worker) -> None:
        """A worker has applied a step."""
        if self._world.schedule.noise > CALM:
            return
        machine = worker.machine
        number = machine.view.number if machine.view else 0
        view, changes, steps, moves = self._since.get(worker.id, (-1, -1, 0, 0))
        if (view, changes) != (number, self._changes):
            steps, moves = 0, machine.moved
        self._since[worker.id] = (number, self._changes, steps + 1, moves)
        self.moves = max(self.moves, machine.moved - moves)
        if machine.moved - moves > MOVES + steps / STEPS_PER_MOVE:
            said = f"{machine.moved - moves} times in {steps} steps of view {number}"
            raise Violation(f"shards moved {said}, and no pace has changed")
        follows = steps < SETTLED_STEPS or not all(machine.shares.values()) or self._follow(worker)
        self._worse[worker.id] = 0 if follows else self._worse.get(worker.id, 0) + 1
        if self._worse[worker.id] > WORSE_STEPS:
            raise Violation(f"shards do not follow the paces: {machine.shares}")

    def _follow(self, worker: Worker) -> bool:
        shares = worker.machine.shares
        paces = {member: self._world.workers[member].speed for member in shares}
        best = expected_s(divide(self._world.schedule.shards, list(shares), paces), paces)
        return expected_s(shares, paces) <= WORST * best
