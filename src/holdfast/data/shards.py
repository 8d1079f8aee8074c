"""Which samples are in which shard: pure index arithmetic over one permutation per epoch.

Invariants: `indices(step, shard)` depends on nothing but the plan, the step and the shard. In an epoch every sample
of the first `steps_per_epoch * batch` places of the permutation is used exactly once; with last="pad" the last batch
is filled up from the permutation's beginning. Owns a cache of two permutations, which changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from holdfast.core.errors import ConfigError
from holdfast.data.seeding import derive_seed

_CACHED_EPOCHS = 2  # a prefetching loader looks into the next epoch while this one ends


@dataclass(frozen=True)
class ShardPlan:
    """How a dataset of `length` samples is cut into steps of `batch` samples in `shards` shards."""

    length: int
    batch: int
    shards: int
    seed: int
    last: Literal["drop", "pad"] = "drop"
    shuffle: bool = True
    _cache: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def validate(self) -> ShardPlan:
        """Itself, or a ConfigError that says what to change."""
        for name in ("length", "batch", "shards", "seed"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ConfigError(f"{name} is {value!r:.40}, not an integer", hint=f"pass an integer as {name}")
        if self.length < 1:
            raise ConfigError("the dataset is empty", hint="pass a dataset with at least one sample")
        if self.shards < 1:
            raise ConfigError(f"shards is {self.shards}", hint="a step has at least 1 shard, and usually 8 to 64")
        if self.batch < 1:
            raise ConfigError(f"batch is {self.batch}", hint="batch counts the samples of a step over all workers")
        if self.batch % self.shards:
            below, above = self.batch // self.shards * self.shards, -(-self.batch // self.shards) * self.shards
            choices = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"a batch of {self.batch} cannot be cut into {self.shards} equal shards",
                hint=f"use batch={choices}, or a number of shards that divides {self.batch}",
            )
        if self.last not in ("drop", "pad"):
            raise ConfigError(f"last is {self.last!r:.40}", hint='use last="drop" or last="pad"')
        if self.last == "drop" and self.length < self.batch:
            raise ConfigError(
                f"the dataset has {self.length} samples, fewer than one batch of {self.batch}",
                hint='use a smaller batch, or last="pad" to fill the last batch up from the epoch\'s beginning',
            )
        return self

    @property
    def samples_per_shard(self) -> int:
        return self.batch // self.shards

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch if self.last == "drop" else -(-self.length // self.batch)

    def epoch_of(self, step: int) -> int:
        """Steps and epochs count from 0."""
        return step // self.steps_per_epoch

    def indices(self, step: int, shard: int) -> list[int]:
        """The samples of shard `shard` of step `step`, in their order."""
        assert step >= 0 and 0 <= shard < self.shards, f"step {step}, shard {shard} of {self.shards}"
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch + shard * self.samples_per_shard
        stop = start + self.samples_per_shard
        if not self.shuffle:
            return [place % self.length for place in range(start, stop)]
        permutation = self._permutation(epoch)
        if stop <= self.length:
            found: list[int] = permutation[start:stop].tolist()
        else:
            found = permutation[torch.arange(start, stop) % self.length].tolist()
        return found

    def _permutation(self, epoch: int) -> torch.Tensor:
        found = self._cache.get(epoch)
        if found is None:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            found = torch.randperm(self.length, generator=generator)
            while len(self._cache) >= _CACHED_EPOCHS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[epoch] = found
        return found
