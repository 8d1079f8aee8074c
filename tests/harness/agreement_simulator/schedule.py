"""What one simulated schedule consists of, drawn from its seed, and the error that says that a promise was broken."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.byzantine.agreement.machine import Timing
from holdfast.byzantine.agreement.misbehaving import KINDS

CLIENT_KINDS = ("honest", "honest", "honest", "absent", "twofold", "partial", "replaying")


class Violation(AssertionError):
    """A promise was broken."""


class SimulationFailed(Exception):
    """Something raised what is neither a broken promise nor a failed assertion."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`Schedule.draw(seed)` makes one up."""

    seed: int
    f: int = 1
    liars: tuple[str, ...] = ("equivocating",)  # the kinds of the servers that lie; which servers they are is drawn
    clients: tuple[str, ...] = ("honest", "honest", "honest")
    rounds: int = 2
    faults: int = 3
    only: tuple[str, ...] = ()  # if given, all faults are of these kinds
    loss: float = 0.03  # of messages, while there are faults
    doubling: float = 0.05

    @property
    def servers(self) -> int:
        return 3 * self.f + 1

    @property
    def timing(self) -> Timing:
        return Timing(collect_s=0.6, timeout_s=0.6, doublings_max=5, resend_s=0.4)

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"agreement schedule {seed}")
        f = rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 2))
        liars = tuple(rng.choice(KINDS) for _ in range(rng.choice((0, f, f, f, f))))
        others = tuple(rng.choice(CLIENT_KINDS) for _ in range(rng.choice((0, 1, 1, 2))))
        return cls(
            seed=seed,
            f=f,
            liars=liars,
            clients=("honest", "honest", *others),
            rounds=rng.choice((1, 2, 2, 3)),
            faults=rng.choice((0, 1, 2, 4, 6)),
            loss=rng.choice((0.0, 0.03, 0.15)),
            doubling=rng.choice((0.0, 0.05, 0.2)),
        )
