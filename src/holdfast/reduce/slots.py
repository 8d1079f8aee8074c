"""Where a worker's sums grow: in its arena, where peers read them, or on its device, from where they are brought there.

`Sums` adds in slots and asks for nothing but their memory. On a device a slot is device memory; when the worker is
through with its shards, each node that it holds is copied once, through pinned memory, into the arena's slot of the
same number. `Deferred` is what a shard says of itself on a device, where to look at it would mean to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from holdfast.devices.copies import Download, Downloads, here
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout


class Slots(Protocol):
    def memory(self, slot: int, layout: Layout) -> torch.Tensor:
        """A slot's bytes, where additions happen."""

    def forget(self) -> None:
        """The slots will have another layout."""


class ArenaSlots:
    def __init__(self, arena: Arena) -> None:
        self.memory = arena.slot

    def forget(self) -> None:
        pass


class DeviceSlots:
    """Each slot has memory of the device from its first use on: as many as are held at once, which are few."""

    def __init__(self, arena: Arena, downloads: Downloads) -> None:
        self.downloads = downloads
        self._arena = arena
        self._memory: dict[int, torch.Tensor] = {}

    def memory(self, slot: int, layout: Layout) -> torch.Tensor:
        found = self._memory.get(slot)
        if found is None:
            device = self.downloads.device
            found = self._memory[slot] = torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=device)
        return found

    def forget(self) -> None:
        self._memory.clear()

    def bring(self, slots: Sequence[int], beside: Sequence[torch.Tensor]) -> Download:
        """These slots, and other things of the step."""
        return self.downloads.begin([*(self._memory[slot] for slot in slots), *beside])

    def put(self, slot: int, layout: Layout, memory: torch.Tensor) -> None:
        """What has come of a slot, where peers read it."""
        self._arena.slot(slot, layout).copy_(memory)


class Deferred:
    """The numbers of the tensors that a shard has a say in, of which some are only known to the device as yet.

    `certain` are known; of those from `first` on `flags` says it, one for each.
    """

    def __init__(self, certain: Sequence[int], first: int, flags: torch.Tensor) -> None:
        self.certain = certain
        self.first = first
        self.flags = flags

    def __iter__(self) -> Iterator[int]:
        """Waits for the device: for those who must know now."""
        (flags,) = here([self.flags])
        return iter(self.decided(flags))

    def decided(self, flags: torch.Tensor) -> list[int]:
        """By the same flags, once they are here."""
        changed = torch.nonzero(flags).flatten().tolist()
        return [*self.certain, *(self.first + number for number in changed)]
