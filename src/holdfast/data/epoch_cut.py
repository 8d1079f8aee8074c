"""An epoch cut into steps that need not be equal: the last one has what is left. Pure arithmetic.

For trainers that promise every sample of an epoch in one update, where a plan without it fills the last step up from
the epoch's beginning. Invariant: over an epoch's steps, each of its first `length` places is in exactly one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class EpochCut:
    """`length` places of an epoch in updates of `size`, `times` steps each.

    A rest with fewer samples than `shards` goes with the update before it.
    """

    length: int
    size: int
    shards: int
    times: int = 1

    def validate(self) -> EpochCut:
        if self.length < self.shards:
            raise ConfigError(
                f"an epoch has {self.length} samples, fewer than the {self.shards} shards of a step",
                hint=f"use at most {max(1, self.length)} shards, or more data",
            )
        return self

    @property
    def _whole(self) -> int:
        """An update has a sample for each shard at least."""
        return self.size * -(-self.shards // self.size)

    @property
    def _updates(self) -> int:
        full, rest = divmod(self.length, self._whole)
        return full + (rest >= self.shards) or 1

    @property
    def steps(self) -> int:
        return self._updates * self.times

    @property
    def largest(self) -> int:
        """Samples of a step."""
        return max(stop - start for start, stop in map(self.bounds, {0, self.steps - 1}))

    def bounds(self, position: int) -> tuple[int, int]:
        """The places of a step of the epoch."""
        update = position // self.times
        start = update * self._whole
        return start, self.length if update == self._updates - 1 else start + self._whole

    def words(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> EpochCut:
        return cls(**words)
