"""Simulated storage: which members of a save have written their share, and which checkpoints are committed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.membership import messages as m
from tests.harness.simulator.schedule import Violation
from tests.harness.simulator.weights import Weights

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World


class Storage:
    """A checkpoint is committed when all members of its save have written: who dies before leaves it open for ever."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"storage {world.schedule.seed}")  # of its own: what else happens stays the same
        self._written: dict[int, set[str]] = {}
        self._weights: dict[int, Weights] = {}
        self.committed: set[int] = set()

    def save(self, worker: Worker, effect: m.Save) -> None:
        if worker.state != effect.step:
            raise Violation(f"{worker.id} saves step {effect.step} with the state of step {worker.state}")
        worker.saving = True
        weights = worker.weights.copy()

        def written() -> None:
            if not worker.alive:
                return
            if worker.stopped:
                self._world.after(0.05, written)
                return
            worker.saving = False
            done = self._written.setdefault(effect.step, set())
            done.add(worker.id)
            if done >= set(effect.members):
                self._world.rewinds.saved(effect.step, worker)
                self.commit(effect.step, weights)

        self._world.after(self._rng.choice((0.01, 0.1, 1.0)), written)

    def commit(self, step: int, weights: Weights) -> None:
        self._world.trace("storage", "has a checkpoint of step", step)
        self.committed.add(step)
        self._weights[step] = weights.copy()

    def restore(self, worker: Worker) -> None:
        """Reading takes a while, in which anything may happen to the view."""
        worker.work(self._rng.choice((0.05, 0.5, 5.0)), lambda: self._restored(worker), blocked=True)

    def _restored(self, worker: Worker) -> m.Event:
        newest = self._world.rewinds.newest(worker)
        self._world.rewinds.check_restored(worker, newest)
        if newest is not None:
            self._world.books.check_origin(worker, newest)
            worker.state = newest
            worker.weights.fetch(self._weights[newest])
            if worker.script is not None:
                worker.script.has_state()
        return m.Restored(newest)
