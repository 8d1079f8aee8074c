"""Which samples are in which shard: pure index arithmetic over one permutation per epoch, or another order.

Invariants: `indices(step, shard)` depends on nothing but the plan, the step and the shard. In an epoch every sample
of the first `steps_per_epoch * batch_size` places of the permutation is used exactly once; without drop_last the last
batch is filled up from the permutation's beginning. The batches of a batch sampler are cut as evenly as can be. Owns a
cache of two permutations, which changes no result.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy
import torch

from holdfast.core.errors import ConfigError
from holdfast.data.arrangement import Arrangement
from holdfast.data.epoch_cut import EpochCut
from holdfast.data.sampling import Order, Sampling
from holdfast.data.seeding import derive_seed

if TYPE_CHECKING:
    from holdfast.data.iterables.handed import HandedBatches

ShardPlace = tuple[int, int]  # (step, shard): which samples, and the random state that they start from
_CACHED_EPOCHS = 2  # a prefetching loader looks into the next epoch while this one ends


@dataclass(frozen=True)
class ShardPlan:
    """How a dataset of `length` samples is cut into steps of `batch_size` samples in `shards` shards.

    `order_seed` is the seed of the order, where that is another than `seed`. With `sampling`, an epoch has the samples
    that it gives; of its batches, `batch_size` is the largest in the first epoch. With `arrangement`, the order of an
    epoch is the dataset's own. `handed`: the batches come from an iterable, and no sample has a number.
    """

    length: int
    batch_size: int
    shards: int
    seed: int
    drop_last: bool = False
    shuffle: bool = True
    order_seed: int | None = None
    sampling: Sampling | None = field(default=None, repr=False, compare=False)
    arrangement: Arrangement | None = field(default=None, repr=False, compare=False)
    handed: HandedBatches | None = field(default=None, repr=False, compare=False)
    _cache: dict[int, Order] = field(default_factory=dict, init=False, repr=False, compare=False)
    _first_steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)  # of epochs

    def validate(self) -> ShardPlan:
        """Itself, or a ConfigError that says what to change."""
        for name in ("length", "batch_size", "shards", "seed"):
            value = getattr(self, name)
            if type(value) is not int:
                raise ConfigError(f"{name} is {value!r:.40}, not an integer", hint=f"pass an integer as {name}")
        if self.length < 1:
            raise ConfigError("the dataset is empty", hint="pass a dataset with at least one sample")
        if self.shards < 1:
            raise ConfigError(f"shards is {self.shards}", hint="a step has at least 1 shard, and usually 8 to 64")
        if self.batch_size < 1:
            raise ConfigError(
                f"batch_size is {self.batch_size}", hint="batch_size counts the samples of a step over all workers"
            )
        if self.batch_size % self.shards and not self._has_batches:
            below = self.batch_size // self.shards * self.shards
            above = below + self.shards
            choices = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"a batch of {self.batch_size} cannot be cut into {self.shards} equal shards",
                hint=f"use batch_size={choices}, or a number of shards that divides {self.batch_size}",
            )
        if type(self.drop_last) is not bool:
            raise ConfigError(
                f"drop_last is {self.drop_last!r:.40}", hint="drop_last=True or drop_last=False, as in PyTorch"
            )
        self._check_samples(0, self.length if self.sampling is None else self.sampling.size)
        return self

    def _check_samples(self, epoch: int, samples: int) -> None:
        if self.drop_last and samples < self.batch_size and not self._has_batches:
            whose = "the dataset has" if self.sampling is None else f"the sampler gives epoch {epoch}"
            raise ConfigError(
                f"{whose} {samples} samples, fewer than one batch of {self.batch_size}",
                hint="use a smaller batch_size, or drop_last=False to fill the last one up from the epoch's beginning",
            )

    @cached_property
    def _has_batches(self) -> bool:
        """They come as such, and may have different sizes."""
        return self.cut is not None or (self.sampling is not None and self.sampling.batches)

    @cached_property
    def cut(self) -> EpochCut | None:
        return self.arrangement.cut if self.sampling is None and self.arrangement is not None else None

    @cached_property
    def samples_per_shard(self) -> int:
        return self.batch_size // self.shards

    @cached_property
    def steps_per_epoch(self) -> int:
        """Where a sampler is a function of the epoch: of the first one."""
        if self.cut is not None:
            return self.cut.steps
        return self._steps_of(self.length if self.sampling is None else self.sampling.size)

    def _steps_of(self, size: int) -> int:
        """`size`: samples of an epoch, or batches, if they come as such."""
        if self._has_batches:
            return size
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """Steps and epochs count from 0."""
        return self.locate(step)[0]

    def first_step(self, epoch: int) -> int:
        """Of an epoch, which is how many steps all before it have."""
        if self.sampling is None or not self.sampling.is_function:
            return epoch * self.steps_per_epoch
        while len(self._first_steps) <= epoch:
            done = len(self._first_steps) - 1
            order = self.sampling.order(done)
            size = len(order.indices if order.ends is None else order.ends)
            self._check_samples(done, size)
            self._first_steps.append(self._first_steps[-1] + self._steps_of(size))
        return self._first_steps[epoch]

    def ends_epoch(self, step: int) -> bool:
        return self.first_step(self.epoch_of(step) + 1) == step + 1

    def locate(self, step: int) -> tuple[int, int]:
        """The step's epoch, and its number in it."""
        if self.sampling is None or not self.sampling.is_function:
            return divmod(step, self.steps_per_epoch)
        while self._first_steps[-1] <= step:
            self.first_step(len(self._first_steps))
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def samples_in(self, step: int) -> int:
        """Of all its shards."""
        epoch, position = self.locate(step)
        if self.cut is not None:
            start, stop = self.cut.bounds(position)
            return stop - start
        if self.sampling is None or not self.sampling.batches:
            return self.batch_size
        start, stop = self.sampling.order(epoch).batch(position)
        return stop - start

    def weight(self, step: int, shard: int) -> float:
        """What a shard's mean counts for in the mean over shards, so that this is the mean over samples."""
        if not self._has_batches:
            return 1.0
        samples = self.samples_in(step)
        first, end = _cut(samples, self.shards, shard)
        return (end - first) * self.shards / samples

    def indices(self, step: int, shard: int) -> list[int]:
        """The samples of shard `shard` of step `step`, in their order."""
        assert step >= 0 and 0 <= shard < self.shards, f"step {step}, shard {shard} of {self.shards}"
        epoch, position = self.locate(step)
        if self.cut is not None and self.arrangement is not None:
            begin, end = self.cut.bounds(position)
            start, stop = (begin + place for place in _cut(end - begin, self.shards, shard))
            return self.arrangement.numbers(epoch, start, stop)
        start = position * self.batch_size + shard * self.samples_per_shard
        stop = start + self.samples_per_shard
        if self.sampling is None and self.arrangement is not None:
            return self.arrangement.wrapped(epoch, start, stop)
        if self.sampling is None and not self.shuffle:
            return [place % self.length for place in range(start, stop)]
        order = self._permutation(epoch) if self.sampling is None else self.sampling.order(epoch)
        if order.ends is not None:
            begin, end = order.batch(position)
            start, stop = (begin + place for place in _cut(end - begin, self.shards, shard))
        indices = order.as_array
        if stop <= len(indices):
            found: list[int] = indices[start:stop].tolist()
        else:
            found = indices[numpy.arange(start, stop) % len(indices)].tolist()
        return found

    def _permutation(self, epoch: int) -> Order:
        found = self._cache.get(epoch)
        if found is None:
            seed = self.seed if self.order_seed is None else self.order_seed
            generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
            found = Order(torch.randperm(self.length, generator=generator))
            while len(self._cache) >= _CACHED_EPOCHS:
                self._cache.pop(next(iter(self._cache)))
            self._cache[epoch] = found
        return found


def _cut(samples: int, shards: int, shard: int) -> tuple[int, int]:
    """Where a shard begins and ends in a batch: the first ones have one sample more, if it cannot be even."""
    size, larger = divmod(samples, shards)
    start = shard * size + min(shard, larger)
    return start, start + size + (shard < larger)
