"""Digests of what a shard leaves: gradients, buffers and metrics; of those on a device once they are here.

Belongs to the thread of the user's loop, which takes what is hashed as it is after the shard, and hashes it later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.devices.copies import Downloads, here
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Number
from holdfast.reduce.slots import Deferred
from holdfast.reduce.sums import Sums
from holdfast.state.layout import TensorSpec, dense, memory_of

Later = Callable[[], str]  # a digest that is asked for when all that is on its way from a device is here


def as_it_is(digest: str) -> Later:
    return lambda: digest


NO_DIGEST = as_it_is("")


def may_be_finite(value: Number) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


class Tap:
    """Takes the digest of what a shard leaves behind, and passes it on if it counts."""

    def __init__(
        self,
        digests: dict[int, Later],
        sums: Sums | None,
        metrics: Mapping[str, Mapping[int, Number]],
        downloads: Downloads | None,
    ) -> None:
        self._digests = digests
        self._sums = sums
        self._metrics = metrics
        self._downloads = downloads

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        recorded = {name: values[shard] for name, values in sorted(self._metrics.items()) if shard in values}
        if self._downloads is None:
            present = list(present)
            numbers = {name: float(value) for name, value in recorded.items()}
            self._digests[shard] = as_it_is(shard_digest(tensors, present, numbers))
        else:
            self._digests[shard] = ShardOnDevice(tensors, present, recorded, self._downloads).digest
        if self._sums is not None:
            self._sums.add(shard, tensors, present)


class ShardOnDevice:
    """What is hashed of a shard, in one piece on its way here: the next shard writes where this one's tensors are."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | None],
        present: Iterable[int],
        recorded: Mapping[str, Number],
        downloads: Downloads,
    ) -> None:
        there = [tensor for tensor in tensors if tensor is not None]
        self._there = [tensor is not None for tensor in tensors]
        self._layout = Layout(there)
        self._present = present
        self._recorded = recorded
        memory = torch.zeros(self._layout.slot_bytes, dtype=torch.uint8, device=downloads.device)
        for view, tensor in zip(self._layout.views(memory), there, strict=True):
            view.copy_(tensor)
        self._names = [name for name, value in recorded.items() if isinstance(value, torch.Tensor)]
        beside = [value for value in recorded.values() if isinstance(value, torch.Tensor)]
        flags = [present.flags] if isinstance(present, Deferred) else []
        self._coming = downloads.begin([memory, *flags, *beside])

    def digest(self) -> str:
        self._coming.wait()
        memory, *rest = self._coming.tensors
        present: Iterable[int] = self._present
        if isinstance(present, Deferred):
            flags, *rest = rest
            present = present.decided(flags)
        views = iter(self._layout.views(memory))
        tensors = [next(views) if there else None for there in self._there]
        came = dict(zip(self._names, rest, strict=True))
        return shard_digest(
            tensors, present, {name: float(came.get(name, one)) for name, one in self._recorded.items()}
        )


def shard_digest(tensors: Sequence[torch.Tensor | None], present: Iterable[int], metrics: Mapping[str, float]) -> str:
    """Of gradients and buffers in their order, of which of them the shard has a say in, and of its metrics."""
    hasher: Any = xxhash.xxh3_128()
    said = [sorted(present), {name: value.hex() for name, value in metrics.items()}]
    hasher.update(json.dumps(said).encode())
    there = [(index, tensor) for index, tensor in enumerate(tensors) if tensor is not None]
    found = here([dense(tensor, "a gradient") for _, tensor in there])
    for (index, _), tensor in zip(there, found, strict=True):
        row_major = tensor.contiguous()
        spec = TensorSpec(row_major.dtype, tuple(row_major.shape))
        hasher.update(json.dumps([index, *spec.to_json()]).encode())
        hasher.update(memory_of(row_major, spec))
    return str(hasher.hexdigest())
