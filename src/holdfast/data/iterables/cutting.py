"""A batch that an iterable gives whole, cut into the parts of a step's shards along the samples. Pure.

A tensor or an array is cut along its first dimension, a list of anything else between its items; dicts, tuples, and
lists of tensors are columns, of which each is cut. What has no dimension, such as a number, is in every part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy
import torch

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind

_HINT = "give an iterable of samples together with batch_size=..., or batches as a DataLoader makes them"


def samples_in(batch: Any) -> int:
    """How many samples a batch has. ConfigError if its parts do not say the same."""
    sizes = set(_sizes(batch))
    if not sizes:
        raise ConfigError(f"the iterable gives {a_kind(batch)}, in which there are no samples to count", hint=_HINT)
    if len(sizes) > 1:
        found = " and ".join(map(str, sorted(sizes)[:2]))
        raise ConfigError(f"the iterable gives a batch whose parts have {found} samples", hint=_HINT)
    return sizes.pop()


def part_of(batch: Any, samples: Sequence[int]) -> Any:
    """The samples with these numbers, which follow each other or are repeated from the first on."""
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        if not batch.ndim:
            return batch
        start, stop = samples[0], samples[-1] + 1
        return batch[start:stop] if stop - start == len(samples) else batch[list(samples)]
    if isinstance(batch, Mapping):
        return {name: part_of(column, samples) for name, column in batch.items()}
    if _has_columns(batch):
        parts = [part_of(column, samples) for column in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, list | tuple):
        return type(batch)(batch[number] for number in samples)
    return batch


def shares(samples: int, shards: int) -> list[list[int]]:
    """Which samples each shard has: as even as can be. Fewer samples than shards come round again."""
    if samples < shards:
        return [[shard % samples] for shard in range(shards)]
    size, larger = divmod(samples, shards)
    ends = [shard * size + min(shard, larger) for shard in range(shards + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(ends)]


def _has_columns(batch: Any) -> bool:
    if not isinstance(batch, list | tuple) or not batch:
        return False
    return all(isinstance(one, torch.Tensor | numpy.ndarray | Mapping | list | tuple) for one in batch)


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor | numpy.ndarray):
        if batch.ndim:
            yield len(batch)
    elif isinstance(batch, Mapping):
        for column in batch.values():
            yield from _sizes(column)
    elif _has_columns(batch):
        for column in batch:
            yield from _sizes(column)
    elif isinstance(batch, list | tuple):
        yield len(batch)
