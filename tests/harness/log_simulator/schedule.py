"""What one simulated schedule consists of, drawn from its seed, and the error that says that a promise was broken."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.log.rules import Rules

DRIFT_MAX = 0.2


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`Schedule.draw(seed)` makes one up."""

    seed: int
    servers: int = 4
    slices: int = 1
    replicas: int = 3
    clients: int = 2
    pushes: int = 8  # of each client, over all slices
    reads: int = 12  # of each client
    faults: int = 5
    only: tuple[str, ...] = ()  # if given, all faults are of these kinds
    durable: bool = False
    agent_tells: bool = True  # somebody sees a server's process end, and says so
    loss: float = 0.03  # of messages, while there are faults
    doubling: float = 0.05
    drift: float = 0.1  # the fastest and the slowest clock
    rates: tuple[float, ...] = ()  # of the servers' clocks; if not given, they are drawn within the drift
    snapshot_every: int = 6
    kept_behind: int = 2
    entries_per_append: int = 4
    tells_at_once: bool = False  # what is committed, however small it is
    lonely: bool = False  # servers end with entries that nobody else has, and as soon as they lead

    def __post_init__(self) -> None:
        assert self.replicas <= self.servers and len(self.rates) in (0, self.servers), self

    @property
    def clocks_keep_their_bound(self) -> bool:
        return self.drift <= DRIFT_MAX

    @property
    def rules(self) -> Rules:
        return Rules(
            lease_s=1.0,
            clock_drift_max=DRIFT_MAX,
            beat_s=0.25,
            stagger_s=0.3,
            offer_again_s=0.5,
            propose_again_s=0.6,
            change_timeout_s=6.0,
            entries_per_append_max=self.entries_per_append,
            uncommitted_max=12,
            sequence_window=4,
            snapshot_every=self.snapshot_every,
            kept_behind=self.kept_behind,
            tell_bytes=0 if self.tells_at_once else 1 << 40,
            durable=self.durable,
        )

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"log schedule {seed}")
        replicas = rng.choice((1, 2, 3, 3, 3, 3, 3, 5))
        return cls(
            seed=seed,
            replicas=replicas,
            servers=replicas + rng.choice((0, 1, 1, 2)),
            slices=rng.choice((1, 1, 1, 2)),
            clients=rng.choice((1, 2, 2, 3)),
            pushes=rng.choice((3, 6, 6, 10)),
            reads=rng.choice((4, 10, 16)),
            faults=rng.choice((0, 2, 4, 6, 9)),
            durable=rng.random() < 0.5,
            agent_tells=rng.random() < 0.5,
            loss=rng.choice((0.0, 0.02, 0.1)),
            doubling=rng.choice((0.0, 0.05, 0.2)),
            drift=rng.choice((0.0, 0.1, DRIFT_MAX, DRIFT_MAX, 0.6)),
            snapshot_every=rng.choice((2, 4, 8, 100)),
            kept_behind=rng.choice((0, 1, 3)),
            entries_per_append=rng.choice((1, 4, 4)),
            lonely=rng.random() < 0.3,
            tells_at_once=rng.random() < 0.4,
        )
