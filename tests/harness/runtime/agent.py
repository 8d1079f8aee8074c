"""The simulated agents: they start workers, see their processes end, tell the ledger, and replace them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from holdfast.core.words import KEY_DEAD, KEY_DONE, KEY_SIZE, KEY_WORKERS, encode_json, worker_id
from tests.harness.runtime.process import Process

if TYPE_CHECKING:
    from tests.harness.runtime.world import World

HOSTS = ("alpha", "beta", "gamma")


class Agent:
    def __init__(self, world: World) -> None:
        self._world = world
        names = HOSTS[: world.schedule.hosts] if world.schedule.hosts > 1 else ("",)
        self.sizes = dict.fromkeys(names, 0)
        self._slots = dict.fromkeys(names, 0)
        self._incarnations: dict[tuple[str, int], int] = {}
        self.away_until = 0.0

    def open(self, workers: int, spares: int) -> None:
        world, names = self._world, list(self.sizes)
        for number in range(workers + spares):
            host = names[number % len(names)]
            self.sizes[host] += number < workers
            slot = self.new_slot(host)
            world.timeline.after(world.timeline.rng.uniform(0.0, 1.0), partial(self.start, host, slot))
        for host in names:
            self.say_size(host)

    def new_slot(self, host: str) -> int:
        slot, self._slots[host] = self._slots[host], self._slots[host] + 1
        return slot

    def say_size(self, host: str) -> None:
        self._world.ledger.put(KEY_SIZE + host, encode_json({"workers": self.sizes[host]}))

    def grow(self, host: str) -> None:
        self.sizes[host] += 1
        self.say_size(host)
        self.start(host, self.new_slot(host))

    def start(self, host: str, slot: int) -> None:
        world = self._world
        if world.is_done:
            return
        if self.away_until > world.timeline.now:
            world.timeline.at(self.away_until, lambda: self.start(host, slot))
            return
        number = self._incarnations[host, slot] = self._incarnations.get((host, slot), 0) + 1
        id = worker_id(slot, number, host)
        world.trace("agent starts", id)
        world.processes[id] = Process(world, id, slot)

    def process_ended(self, process: Process) -> None:
        """The kernel closes its connections; the agent buries it, and starts another if it should be there."""
        world, rng = self._world, self._world.timeline.rng
        process.alive = False
        world.network.process_ended(process.id)
        world.timeline.after(rng.choice((0.002, 0.01, 0.1)), lambda: self._bury(process.id))
        if process.ended in ("killed", "evicted"):
            host = process.id.partition("@")[2]
            world.timeline.after(rng.uniform(0.2, 3.0), lambda: self.start(host, process.slot))
        elif process.ended == "finished":
            world.is_done = True
            world.ledger.put(KEY_DONE, b"{}")  # the agent sees to it that the ledger knows

    def _bury(self, worker: str) -> None:
        world = self._world
        if self.away_until > world.timeline.now:
            world.timeline.at(self.away_until, lambda: self._bury(worker))
            return
        world.ledger.delete(KEY_WORKERS + worker)
        world.ledger.put(KEY_DEAD + worker, b"{}")
