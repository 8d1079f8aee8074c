"""What a step's shards leave on a device comes to where members read it: sums, metrics, and which buffers have changed.

All of it comes once, when the worker is through with its shards, and nobody waits for it in the loop's thread: the
worker asks now and then whether it is here, and hears its peers meanwhile. Belongs to that thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.devices.copies import Download
from holdfast.reduce.reduction import Number
from holdfast.reduce.slots import DeviceSlots
from holdfast.reduce.sums import Sums
from holdfast.reduce.tree import Range

Metrics = dict[str, dict[int, Number]]


class Bringing(Protocol):
    def begin(self, metrics: Metrics) -> None:
        """All shards that were to be computed are. The metrics become numbers."""

    def is_done(self) -> bool:
        """Whether all is where others may read it."""


class AlreadyHere:
    """Sums in this process's memory grow where peers read them."""

    def begin(self, metrics: Metrics) -> None:
        pass

    def is_done(self) -> bool:
        return True


class FromDevice:
    def __init__(self, sums: Sums, slots: DeviceSlots) -> None:
        self._sums = sums
        self._slots = slots
        self._step = -1
        self._put: dict[Range, int] = {}  # nodes of this step that peers can read, and where
        self._coming: Download | None = None
        self._nodes: list[tuple[Range, int]] = []  # that are on their way
        self._recorded: list[tuple[dict[int, Number], int]] = []  # where the numbers go that are

    def begin(self, metrics: Metrics) -> None:
        sums = self._sums
        if sums.step != self._step:
            self._step, self._put = sums.step, {}
        self._nodes = [(node, slot) for node, slot in sums.held.items() if self._put.get(node) != slot]
        found = [
            (values, shard, value)
            for values in metrics.values()
            for shard, value in values.items()
            if isinstance(value, torch.Tensor)
        ]
        self._recorded = [(values, shard) for values, shard, _ in found]
        beside: list[torch.Tensor] = []
        if found:
            beside.append(torch.stack([value for _, _, value in found]))
        if sums.deferred:
            beside.append(torch.stack([one.flags for one in sums.deferred]))
        slots = [slot for _, slot in self._nodes]
        self._coming = self._slots.bring(slots, beside) if slots or beside else None

    def is_done(self) -> bool:
        if self._coming is not None and self._coming.is_here():
            self._take(self._coming.tensors)
            self._coming = None
        return self._coming is None and self._slots.downloads.is_idle()

    def _take(self, tensors: Sequence[torch.Tensor]) -> None:
        sums, arrived = self._sums, iter(tensors)
        assert sums.layout is not None
        for node, slot in self._nodes:
            self._slots.put(slot, sums.layout, next(arrived))
            self._put[node] = slot
        if self._recorded:
            for (values, shard), number in zip(self._recorded, next(arrived).tolist(), strict=True):
                values[shard] = number
        if sums.deferred:
            for one, flags in zip(sums.deferred, next(arrived), strict=True):
                sums.present.update(one.decided(flags))
            sums.deferred = []
