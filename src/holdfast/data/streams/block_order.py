"""The order of a stream's epoch: blocks of neighbouring samples permuted, then samples shuffled in bounded windows.

Samples are numbered in the order of the sources. A source is cut into blocks of `block` samples; an epoch permutes all
blocks, and shuffles the samples of as many blocks that then follow each other as make at most a window. So a window's
samples come from as many places of the data as it has blocks, and to find the sample in any place of an epoch takes the
permutation of blocks and one window. A block that is larger than a window is several windows, which follow each other:
what reads it goes through it once.

Invariants: what is in a place depends on nothing but the sizes, block, window, seed and epoch; each sample is in one
place of an epoch; no window has more than `window` samples. Owns caches of two epochs and a few windows, which change
no result. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch

from holdfast.data.seeding import derive_seed

Numbers: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.int64]]
_CACHED_EPOCHS = 2  # a prefetching loader looks into the next epoch while this one ends
_CACHED_WINDOWS = 4  # and into the next window


@dataclass(frozen=True)
class EpochBlocks:
    """The blocks of an epoch in their order; those that are larger than a window in parts.

    `firsts`: which block each window begins with. `window_ends`: how many samples the windows up to each have.
    """

    blocks: Numbers
    firsts: Numbers
    window_ends: Numbers


class BlockOrder:
    """`sizes`: samples of each source. Without `shuffle` the samples come as they are numbered."""

    def __init__(self, sizes: Sequence[int], *, block: int, window: int, seed: int, shuffle: bool = True) -> None:
        self.sizes = tuple(int(size) for size in sizes)
        self.block, self.window, self.shuffle = block, window, shuffle
        self.length = sum(self.sizes)
        self._seed = seed
        self._window_most = max(1, window)
        whole = _blocks(self.sizes, block)[1]
        self._parts = -(-whole // self._window_most)  # of each block
        self.starts, self.counts = _blocks(whole, self._window_most)
        self._epochs: dict[int, EpochBlocks] = {}
        self._windows: dict[tuple[int, int], Numbers] = {}

    def numbers(self, epoch: int, start: int, stop: int) -> Numbers:
        """The samples in these places of an epoch."""
        assert 0 <= start <= stop <= self.length, f"places {start} to {stop} of {self.length}"
        if not self.shuffle:
            return numpy.arange(start, stop, dtype=numpy.int64)
        ends = self.epoch_blocks(epoch).window_ends
        pieces = [numpy.empty(0, dtype=numpy.int64)]
        while start < stop:
            window = int(numpy.searchsorted(ends, start, side="right"))
            first = int(ends[window - 1]) if window else 0
            last = min(stop, int(ends[window]))
            pieces.append(self.window_numbers(epoch, window)[start - first : last - first])
            start = last
        return numpy.concatenate(pieces)

    def epoch_blocks(self, epoch: int) -> EpochBlocks:
        found = self._epochs.get(epoch)
        if found is None:
            if self.shuffle:
                blocks = self._in_parts(_permutation(len(self._parts), derive_seed(self._seed, "blocks", epoch)))
            else:
                blocks = numpy.arange(len(self.starts), dtype=numpy.int64)
            ends = numpy.cumsum(self.counts[blocks])
            firsts = _firsts(ends, self._window_most)
            window_ends = numpy.append(ends[firsts[1:] - 1], ends[-1:])
            found = _keep(self._epochs, epoch, EpochBlocks(blocks, firsts, window_ends), _CACHED_EPOCHS)
        return found

    def _in_parts(self, blocks: Numbers) -> Numbers:
        """The numbers of the blocks' parts."""
        parts = self._parts[blocks]
        before = numpy.cumsum(parts) - parts
        first_parts = (numpy.cumsum(self._parts) - self._parts)[blocks]
        found: Numbers = numpy.repeat(first_parts - before, parts) + numpy.arange(int(parts.sum()))
        return found

    def up_to_windows(self, epoch: int, of_blocks: Numbers) -> Numbers:
        """Of something that is counted for each block of `starts`: how much the windows up to each have."""
        found = self.epoch_blocks(epoch)
        sums: Numbers = of_blocks[:0]
        if len(found.firsts):
            sums = numpy.cumsum(numpy.add.reduceat(of_blocks[found.blocks], found.firsts))
        return sums

    def window_numbers(self, epoch: int, window: int) -> Numbers:
        """All samples of a window, in their order."""
        found = self._windows.get((epoch, window))
        if found is None:
            of_epoch = self.epoch_blocks(epoch)
            first, last = [*of_epoch.firsts[window : window + 2].tolist(), len(of_epoch.blocks)][:2]
            blocks = of_epoch.blocks[first:last]
            counts = self.counts[blocks]
            before = numpy.cumsum(counts) - counts
            samples = numpy.repeat(self.starts[blocks] - before, counts) + numpy.arange(int(counts.sum()))
            if self.shuffle:
                samples = samples[_permutation(len(samples), derive_seed(self._seed, "window", epoch, window))]
            found = _keep(self._windows, (epoch, window), samples, _CACHED_WINDOWS)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}, "_windows": {}}


def _firsts(ends: Numbers, most: int) -> Numbers:
    """With which block each window begins, where each has as many blocks as make at most so many samples."""
    firsts = []
    block = done = 0
    while block < len(ends):
        firsts.append(block)
        block = int(numpy.searchsorted(ends, done + most, side="right"))
        done = int(ends[block - 1])
    return numpy.array(firsts, dtype=numpy.int64)


def _blocks(sizes: Sequence[int] | Numbers, block: int) -> tuple[Numbers, Numbers]:
    """Where each block begins, and how many samples it has: the last one of a source may have fewer."""
    of_sources = numpy.array(sizes, dtype=numpy.int64)
    blocks = -(-of_sources // block)
    first_samples = numpy.cumsum(of_sources) - of_sources
    first_blocks = numpy.cumsum(blocks) - blocks
    in_source = numpy.arange(int(blocks.sum()), dtype=numpy.int64) - numpy.repeat(first_blocks, blocks)
    starts = numpy.repeat(first_samples, blocks) + in_source * block
    counts = numpy.minimum(block, numpy.repeat(of_sources, blocks) - in_source * block)
    return starts, counts


def _permutation(length: int, seed: int) -> Numbers:
    found: Numbers = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).numpy()
    return found


def _keep(cache: dict[Any, Any], key: Any, value: Any, most: int) -> Any:
    while len(cache) >= most:
        cache.pop(next(iter(cache)))
    cache[key] = value
    return value
