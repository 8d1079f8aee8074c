"""What a simulated worker's processor makes of a shard: the right bits or, in one worker, sometimes wrong ones."""

from __future__ import annotations

import random

from holdfast.membership import messages as m
from holdfast.membership.auditing import Said
from tests.harness.simulator.schedule import Schedule

RIGHT = "right"


class Hardware:
    """Of one process. The liar is the first worker of a slot that the seed names; who comes after it is honest."""

    def __init__(self, schedule: Schedule, worker: str) -> None:
        slot = random.Random(f"liar {schedule.seed}").randrange(max(1, schedule.workers // schedule.hosts))
        self._lies = schedule.lies if worker.partition("@")[0] == f"w{slot}.1" else 0.0
        self._audits = schedule.audit
        self._rng = random.Random(f"{schedule.seed} {worker}")
        self._step = -1
        self._values: dict[int, str] = {}  # of the shards that count
        self._said: dict[int, str] = {}
        self._audited: set[int] = set()
        self.has_lied = False

    def computes(self, effect: m.Compute) -> Said:
        """The shards that count, then those that are only compared; and what it says of them."""
        if effect.step != self._step:
            self._step, self._values, self._said, self._audited = effect.step, {}, {}, set()
        for shard in effect.shards:
            self._values[shard] = self._said[shard] = self._compute()
        for shard in effect.audits:
            self._audited.add(shard)
            if shard not in self._said:
                self._said[shard] = self._compute()
        return Said(tuple(sorted(self._said.items()))) if self._audits else Said()

    def _compute(self) -> str:
        if self._rng.random() >= self._lies:
            return RIGHT
        self.has_lied = True
        return f"wrong {self._rng.random()}"

    def counted(self, step: int) -> set[int]:
        return set(self._values) if step == self._step else set()

    def audited(self, step: int) -> set[int]:
        """Shards that it was asked to compute for comparison."""
        return self._audited if step == self._step else set()

    def wrong(self, step: int) -> set[int]:
        return {shard for shard, value in self._values.items() if value != RIGHT} if step == self._step else set()
