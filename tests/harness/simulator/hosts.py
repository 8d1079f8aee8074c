"""Simulated hosts: each has an agent that starts workers, sees them end, tells the ledger, and replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.words import KEY_DEAD, KEY_WORKERS, worker_id
from holdfast.membership import messages as m
from tests.harness.simulator.groups import GroupWorker
from tests.harness.simulator.schedule import Violation
from tests.harness.simulator.standing_in import LateWorker
from tests.harness.simulator.worker import Worker

if TYPE_CHECKING:
    from tests.harness.simulator.world import World


class Host:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.agents_away = 0  # faults that keep its agent away
        self.off = False
        self.cuts = 0  # between it and the ledger
        self.size = 0
        self.slots = 0
        self._incarnations: dict[int, int] = {}

    @property
    def has_agent(self) -> bool:
        return not self.off and not self.agents_away

    def spawn(self, slot: int) -> None:
        world = self.world
        if world.done:
            return
        if not self.has_agent:
            world.after(0.5, lambda: self.spawn(slot))
            return
        self.slots = max(self.slots, slot + 1)
        number = self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        kind = LateWorker if world.schedule.stands_in else GroupWorker if world.schedule.ranks > 1 else Worker
        worker = kind(world, self, slot, worker_id(slot, number, self.name))
        worker.cuts = self.cuts
        world.workers[worker.id] = worker
        world.trace("agent starts", worker.id)
        worker.feed.start()
        world.tick(worker)

    def process_ended(self, worker: Worker) -> None:
        """The kernel closes its connections; the agent tells the ledger when it and the ledger are there."""
        worker.alive = False
        self.world.network.drop(worker, self.world.network.view_of(worker.id))
        self.world.after(self.world.rng.choice((0.002, 0.01, 0.1)), lambda: self._bury(worker.id))

    def _bury(self, worker: str) -> None:
        def fence() -> None:
            self.world.ledger.delete(KEY_WORKERS + worker)
            self.world.ledger.put(KEY_DEAD + worker, {})

        self.write(fence)

    def write(self, act: Callable[[], object]) -> None:
        """Something that the agent puts into the ledger as soon as it can."""
        if not self.has_agent or self.cuts:
            self.world.after(0.2, lambda: self.write(act))
        else:
            self.world.ledger.when_up(act)

    def crash(self, worker: Worker) -> None:
        self.world.trace("crash", worker.id)
        self.process_ended(worker)
        self.world.after(self.world.rng.uniform(0.2, 3.0), lambda: self.spawn(worker.slot))

    def ended(self, worker: Worker, effect: m.End) -> None:
        if effect.kind == "evicted":
            self.crash(worker)
            return
        if effect.kind in ("corrupt", "script", "rewind"):
            self.world.given_up, self.world.verdict = True, effect.kind
        if effect.kind == "done" and not self.world.done:
            raise Violation(f"{worker.id} thinks that the run is done")
        worker.finished = True
        self.process_ended(worker)

    def lose_power(self, back_s: float) -> None:
        """Agent and workers are gone at once, and nobody says so. It comes back and buries its dead."""
        self.off = True
        lost = [worker for worker in self.world.workers.values() if worker.agent is self and worker.alive]
        for worker in lost:
            worker.alive, worker.vanished = False, True
            self.world.network.vanish(worker)

        def back() -> None:
            self.off = False
            for worker in lost:
                worker.vanished = False
                self._bury(worker.id)
                if not worker.finished:
                    self.world.after(self.world.rng.uniform(0.2, 3.0), lambda slot=worker.slot: self.spawn(slot))  # type: ignore[misc]

        self.world.after(back_s, back)
