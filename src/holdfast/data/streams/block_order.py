"""The order of a stream's epoch: blocks of neighbouring samples permuted, then samples shuffled in bounded windows.

Samples are numbered in the order of the sources. A source is cut into blocks of `block` samples; an epoch permutes all
blocks, and shuffles the samples of each `window // block` blocks that then follow each other. So a window's samples
come from as many places of the data as it has blocks, and to find the sample in any place of an epoch takes the
permutation of blocks and one window.

Invariants: what is in a place depends on nothing but the sizes, block, window, seed and epoch; each sample is in one
place of an epoch. Owns caches of two epochs and a few windows, which change no result. Reads nothing.
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
    """The blocks of an epoch in their order. `window_ends`: how many samples the windows up to each have."""

    blocks: Numbers
    window_ends: Numbers


class BlockOrder:
    """`sizes`: samples of each source. Without `shuffle` the samples come as they are numbered."""

    def __init__(self, sizes: Sequence[int], *, block: int, window: int, seed: int, shuffle: bool = True) -> None:
        self.sizes = tuple(int(size) for size in sizes)
        self.block, self.window, self.shuffle = block, window, shuffle
        self.length = sum(self.sizes)
        self._seed = seed
        self.blocks_per_window = max(1, window // block)
        self.starts, self.counts = _blocks(self.sizes, block)
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
                blocks = _permutation(len(self.starts), derive_seed(self._seed, "blocks", epoch))
            else:
                blocks = numpy.arange(len(self.starts), dtype=numpy.int64)
            ends = self.up_to_windows(self.counts[blocks])
            found = _keep(self._epochs, epoch, EpochBlocks(blocks, ends), _CACHED_EPOCHS)
        return found

    def up_to_windows(self, of_blocks: Numbers) -> Numbers:
        """Of something that is counted for each block of an epoch: how much the windows up to each have."""
        firsts = numpy.arange(0, len(of_blocks), self.blocks_per_window)
        sums: Numbers = numpy.cumsum(numpy.add.reduceat(of_blocks, firsts)) if len(firsts) else of_blocks
        return sums

    def window_numbers(self, epoch: int, window: int) -> Numbers:
        """All samples of a window, in their order."""
        found = self._windows.get((epoch, window))
        if found is None:
            first = window * self.blocks_per_window
            blocks = self.epoch_blocks(epoch).blocks[first : first + self.blocks_per_window]
            counts = self.counts[blocks]
            before = numpy.cumsum(counts) - counts
            samples = numpy.repeat(self.starts[blocks] - before, counts) + numpy.arange(int(counts.sum()))
            if self.shuffle:
                samples = samples[_permutation(len(samples), derive_seed(self._seed, "window", epoch, window))]
            found = _keep(self._windows, (epoch, window), samples, _CACHED_WINDOWS)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}, "_windows": {}}


def _blocks(sizes: Sequence[int], block: int) -> tuple[Numbers, Numbers]:
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
