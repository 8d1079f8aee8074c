"""What one simulated run consists of, and the error that says that a promise was broken."""

from __future__ import annotations

import random
from dataclasses import dataclass


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one simulated run consists of. `Schedule.draw(seed)` makes one up."""

    seed: int
    workers: int = 3
    spares: int = 0
    shards: int = 4
    steps: int = 5
    faults: int = 4
    two_rounds: bool = True
    network: bool = False  # sums travel with the reduction, which fails when their owner dies before it

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        return cls(
            seed=seed,
            workers=rng.choice((1, 2, 3, 3, 4)),
            spares=rng.choice((0, 0, 0, 1)),
            shards=rng.choice((1, 2, 4, 5)),
            steps=rng.choice((3, 4, 6)),
            faults=rng.choice((0, 1, 2, 3, 4, 6)),
            two_rounds=(two_rounds := rng.random() < 0.5),
            network=not two_rounds and rng.random() < 0.5,
        )
