"""What one simulated run consists of, and the error that says that a promise was broken."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from holdfast.membership.step_rules import StepRules
from tests.harness.simulator.script import Loop, draw_loops

STRICT = StepRules()


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
    hosts: int = 1  # one: the agent serves the ledger; several: the ledger is a cluster of its own
    save_every: int = 0  # steps; 0: the run keeps no checkpoints
    audit: bool = False  # every shard is computed by two
    lies: float = 0.0  # how often one worker, the first of its slot, computes a shard wrongly
    drifts: str = ""  # how states go apart: see drifting.py
    ranks: int = 1  # of the group that each worker is
    late: bool = False  # who is late with its shards is left behind
    pauses: int = 0  # how often a worker's loop stands still for a while, or its whole process
    step_rules: StepRules = STRICT  # a mode's
    stands_in: bool = False  # a worker that is late does not hold up its steps: it has a stand-in
    hangs: int = 0  # how often a worker's script comes to a standstill
    rewinds: int = 0  # steps that are bad: the run goes back, and passes them
    slowed: int = 0  # how often a worker's pace changes for good
    noise: float = 0.5  # of every pace, from step to step
    loops: tuple[Loop, ...] = ()  # of the script; none: it ends with its last step, as if it had no loop
    fault: str = ""  # if given, all faults are of this kind

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        hosts = rng.choice((1, 1, 2, 3))
        two_rounds = rng.random() < 0.5
        drawn = cls(
            seed=seed,
            workers=rng.choice((1, 2, 3, 3, 4)) if hosts == 1 else rng.choice((hosts, 3, 4, 5)),
            spares=rng.choice((0, 0, 0, 1)),
            shards=rng.choice((1, 2, 4, 5)),
            steps=rng.choice((3, 4, 6)) if rng.random() < 0.8 else rng.choice((15, 30)),
            faults=rng.choice((0, 1, 2, 3, 4, 6)),
            two_rounds=two_rounds,
            network=not two_rounds and rng.random() < 0.5,
            hosts=hosts,
            late=random.Random(f"late {seed}").random() < 0.5,
            pauses=random.Random(f"pauses {seed}").choice((0, 0, 0, 2)),
            save_every=random.Random(f"saves {seed}").choice((0, 0, 1, 2, 3)),
            hangs=random.Random(f"hangs {seed}").choice((0, 0, 0, 0, 1, 2)),
            rewinds=random.Random(f"rewinds {seed}").choice((0, 0, 0, 0, 0, 0, 1, 2)),
        )
        return replace(drawn, loops=draw_loops(seed, drawn.steps))
