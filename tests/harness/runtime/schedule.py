"""What one simulated run consists of, drawn from its seed; and the error that says that a promise was broken."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.harness.runtime.scripts import Script

SCRIPTS = 400  # different ones: what each comes to, quietly and by itself, is computed once


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    script: Script
    workers: int = 3
    spares: int = 0
    hosts: int = 1
    path: str = "host"  # how gradients travel: see core/config.py
    faults: int = 3
    save_every: int = 0  # steps; 0: the run keeps no checkpoints
    late_s: float = 0.0  # after so long the others go on without a worker that is late; 0: never
    fault: str = ""  # if given, all faults are of this kind
    network: str = "quick"  # how long messages take: see network.py
    ambushes: float = 0.0  # so many of the faults wait for a worker that is in a moment of the protocol
    in_steps: bool = False  # faults come with the steps, rather than at any time: few would come in the middle of a run
    shards_take: float = 1.0  # times what they take otherwise: joiners take seconds to come

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        hosts = rng.choice((1, 1, 1, 2))
        return cls(
            seed=seed,
            script=Script.draw(rng.randrange(SCRIPTS)),
            workers=rng.choice((1, 2, 3, 3, 4)) if hosts == 1 else rng.choice((2, 3, 4)),
            spares=rng.choice((0, 0, 0, 1)),
            hosts=hosts,
            path="hosts" if hosts > 1 else rng.choice(("host", "host", "hosts", "network")),
            faults=rng.choice((0, 1, 2, 3, 4, 6)),
            save_every=rng.choice((0, 0, 1, 2, 3)),
            late_s=rng.choice((0.0, 0.0, 0.5)),
            network=rng.choice(("quick", "quick", "slow")),
            ambushes=rng.choice((0.0, 0.5, 0.5)),
            in_steps=rng.random() < 0.7,
            shards_take=rng.choice((1.0, 3.0, 8.0)),
        )
