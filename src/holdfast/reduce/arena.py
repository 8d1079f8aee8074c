"""A worker's sums in memory that its peers on the same host can read.

An arena is an anonymous memory file: it has no name, takes room only where it is touched, outlives its owner for
as long as a peer has it mapped, and is gone when nobody has. Its owner alone writes it: a worker that slept, and
wakes in the middle of what it was writing, spoils nothing for those that went on without it.

    header (two pages): the stamp, the stamp of the result, and which shards the result was made of were trusted
    slot 0 .. slot n-1: sums of tree nodes
    result: the reduced gradient

Where a worker is a group of ranks, each with its part of the model, one file holds as many of these, one after the
other, and each rank writes its own.

The stamps say which view and step the sums, and the result, belong to. Their owner changes one before it touches a
slot or the result; a reader looks at it after it has read. So a worker that slept while the others went on cannot
mistake new sums for old. (On x86 stores are seen in order; elsewhere the messages that surround a reduction are the
barrier.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from itertools import pairwise

import torch

from holdfast.reduce.layout import Layout, round_up

PAGE_BYTES = mmap.PAGESIZE  # slots begin on pages, so that parts of a result can be mapped by themselves
STAMP_STEPS = 1 << 40
HEADER_BYTES = 2 * PAGE_BYTES
TRUSTED_AT = 64  # in the header: how many flags there are, 0 for none, and then the flags
MAP_FIXED = 0x10  # linux/mman.h; Python's mmap does not have it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class Arena:
    """`slots` slots and a result area, each of `slot_bytes` bytes, over a memory file. `part`: of the `parts` in it."""

    def __init__(self, fd: int, slots: int, slot_bytes: int, *, part: int = 0, parts: int = 1) -> None:
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.part, self.parts = part, parts
        size = self.size(slots, slot_bytes)
        if os.fstat(fd).st_size < size * parts or (parts > 1 and slot_bytes % PAGE_BYTES):
            raise ValueError("the memory file is smaller than its arena")
        self._start = part * size
        self._map = mmap.mmap(fd, size, offset=self._start)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._stamps = memoryview(self._map)[:16].cast("q")

    @staticmethod
    def size(slots: int, slot_bytes: int) -> int:
        return HEADER_BYTES + (slots + 1) * slot_bytes

    @classmethod
    def create(cls, slots: int, slot_bytes: int, *, parts: int = 1) -> Arena:
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
        fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size(slots, slot_bytes) * parts)
        return cls(fd, slots, slot_bytes, parts=parts)

    def of_peer(self, fd: int, slots: int, slot_bytes: int) -> Arena:
        """The arena behind a descriptor that a peer has passed. ValueError or OSError if it is not one."""
        return Arena(fd, slots, slot_bytes, part=self.part, parts=self.parts)

    def slot(self, index: int, layout: Layout) -> torch.Tensor:
        assert 0 <= index <= self.slots and layout.slot_bytes <= self.slot_bytes
        start = HEADER_BYTES + index * self.slot_bytes
        return self.memory[start : start + layout.slot_bytes]

    def result(self, layout: Layout) -> torch.Tensor:
        return self.slot(self.slots, layout)

    @property
    def result_offset(self) -> int:
        """In the file."""
        return self._start + HEADER_BYTES + self.slots * self.slot_bytes

    @property
    def stamp(self) -> tuple[int, int]:
        return divmod(self._stamps[0], STAMP_STEPS)

    def set_stamp(self, view: int, step: int) -> None:
        self._stamps[0] = view * STAMP_STEPS + step

    @property
    def result_stamp(self) -> tuple[int, int]:
        return divmod(self._stamps[1], STAMP_STEPS)

    def claim_result(self, view: int, step: int) -> None:
        """Before the first byte of this step's mean is written: what was there may no longer be used."""
        self._stamps[1] = view * STAMP_STEPS + step

    def note_trusted(self, trusted: Sequence[bool] | None) -> None:
        """Beside a result, before others are told that it is there."""
        flags = bytes(trusted or ())
        self._map[TRUSTED_AT : TRUSTED_AT + 4 + len(flags)] = len(flags).to_bytes(4, "little") + flags

    def trusted(self) -> tuple[bool, ...] | None:
        room = HEADER_BYTES - TRUSTED_AT - 4
        count = min(int.from_bytes(self._map[TRUSTED_AT : TRUSTED_AT + 4], "little"), room)
        flags = self._map[TRUSTED_AT + 4 : TRUSTED_AT + 4 + count]
        return tuple(flag != 0 for flag in flags) if count else None

    def free_result(self, but: tuple[int, int]) -> None:
        """Give back the memory of the result area outside these bytes, which begin and end on pages."""
        start, stop = but
        for low, high in ((0, start), (stop, self.slot_bytes)):
            if low < high:
                self._map.madvise(mmap.MADV_REMOVE, self.result_offset - self._start + low, high - low)

    def close(self) -> None:
        """Close the file. The memory goes when the last tensor over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def result_parts(layout: Layout, parts: int, unit_bytes: int = PAGE_BYTES) -> list[tuple[int, int]]:
    """The bytes of a result area in even runs of whole units, which are of whole pages."""
    units = -(-layout.slot_bytes // unit_bytes)
    end = round_up(layout.slot_bytes, PAGE_BYTES)
    edges = [min(units * part // parts * unit_bytes, end) for part in range(parts + 1)]
    return list(pairwise(edges))


def joint_result(arenas: Sequence[Arena], layout: Layout, unit_bytes: int = PAGE_BYTES) -> torch.Tensor:
    """The result area of a whole crew as one run of memory, to read: each part of it is in another arena.

    Pages of memory files can be mapped side by side, so nobody copies, and nobody writes into another's arena.
    """
    parts = result_parts(layout, len(arenas), unit_bytes)
    memory = torch.frombuffer(mmap.mmap(-1, parts[-1][1]), dtype=torch.uint8)  # unmapped with the last tensor over it
    for arena, (start, stop) in zip(arenas, parts, strict=True):
        if start == stop:
            continue
        address, offset = memory.data_ptr() + start, arena.result_offset + start
        mapped = _libc.mmap(address, stop - start, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, arena.fd, offset)
        if mapped != address:
            raise OSError(ctypes.get_errno(), "cannot map a part of the result")
    return memory[: layout.slot_bytes]
