"""A worker's sums in memory that its peers on the same host can read.

An arena is an anonymous memory file: it has no name, takes room only where it is touched, outlives its owner for
as long as a peer has it mapped, and is gone when nobody has. Its owner alone writes the slots. The result area of
the view's first member is written by all members, each its own slice.

    header (one page): the stamp
    slot 0 .. slot n-1: sums of tree nodes
    result: the reduced gradient

The stamp says which view and step the sums belong to. Its owner changes it before it touches a slot; a reader looks
at it after it has read. So a worker that slept while the others went on cannot mistake new sums for old. (On x86
stores are seen in order; elsewhere the messages that surround a reduction are the barrier.)
"""

from __future__ import annotations

import mmap
import os

import torch

from holdfast.reduce.layout import PAGE_BYTES, Layout, round_up

STAMP_STEPS = 1 << 40


class Arena:
    """`slots` slots and a result area, each of `slot_bytes` bytes, over a memory file."""

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        size = self.size(slots, slot_bytes)
        if os.fstat(fd).st_size < size:
            raise ValueError("the memory file is smaller than its arena")
        self._map = mmap.mmap(fd, size)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._stamp = memoryview(self._map)[:8].cast("q")

    @staticmethod
    def size(slots: int, slot_bytes: int) -> int:
        return PAGE_BYTES + (slots + 1) * slot_bytes

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Arena:
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
        fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size(slots, slot_bytes))
        return cls(fd, slots, slot_bytes)

    def slot(self, index: int, layout: Layout) -> torch.Tensor:
        assert 0 <= index <= self.slots and layout.slot_bytes <= self.slot_bytes
        start = PAGE_BYTES + index * self.slot_bytes
        return self.memory[start : start + layout.slot_bytes]

    def result(self, layout: Layout) -> torch.Tensor:
        return self.slot(self.slots, layout)

    @property
    def stamp(self) -> tuple[int, int]:
        value = self._stamp[0]
        return value // STAMP_STEPS, value % STAMP_STEPS

    def set_stamp(self, view: int, step: int) -> None:
        self._stamp[0] = view * STAMP_STEPS + step

    def close(self) -> None:
        """Close the file. The memory goes when the last tensor over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
