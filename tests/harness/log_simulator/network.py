"""Messages between servers and clients: each has its own delay, may be lost or doubled, and some ways are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness.log_simulator.world import World

Way = tuple[str, str]  # from, to: places, which outlive processes


class Network:
    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: Counter[Way] = Counter()
        self.slow: Counter[str] = Counter()

    def cut(self, ways: Iterable[Way]) -> None:
        self._cuts.update(ways)

    def heal(self, ways: Iterable[Way]) -> None:
        self._cuts.subtract(ways)

    def is_cut(self, way: Way) -> bool:
        return self._cuts[way] > 0

    def carry(self, way: Way, deliver: Callable[[], None]) -> None:
        world = self._world
        rng = world.rng
        copies = 1
        if world.faulty:
            if rng.random() < world.schedule.loss:
                return
            copies += rng.random() < world.schedule.doubling
        for _ in range(copies):
            delay = rng.uniform(0.002, 0.03)
            if world.faulty and rng.random() < 0.03:
                delay = rng.uniform(0.1, 3.0)
            if self.slow[way[0]] > 0 or self.slow[way[1]] > 0:
                delay += rng.uniform(0.1, 0.6)
            world.after(delay, lambda: None if self.is_cut(way) else deliver())
