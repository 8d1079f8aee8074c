"""The memory that a rank shares with those of its host: its records, as a ring, and room for its tensors.

One anonymous memory file for the life of a worker, cut into REGIONS regions that take room only where they are touched.
A view uses the region of its number: a rank that goes on to the next view leaves what others may still read alone, and
gives it back when the view after that one begins. Its owner alone writes a region.

    stamp, head, asleep      the view; bytes of records written so far; whether the owner waits for a doorbell
    read[rank]               how far the owner has read the ring of that rank
    ring                     RING_BYTES, from HEAD_BYTES on
    heap                     the rest

(On x86 stores are seen in order, so whoever sees a head sees the records before it; elsewhere ranks use connections.)
"""

from __future__ import annotations

import mmap
import os
import platform

import torch

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.records import HEAD, Record, What

REGIONS = 4
REGION_BYTES = 1 << 34
HEAD_BYTES = 4 * 4096
RING_BYTES = 4 * 1024 * 1024
HEAP_AT = HEAD_BYTES + RING_BYTES
HEAP_BYTES = REGION_BYTES - HEAP_AT
_STAMP, _HEAD, _ASLEEP, _READ = 0, 1, 2, 8  # in words of 8 bytes


def is_possible() -> bool:
    """Whether this machine's memory shows stores in their order."""
    return platform.machine() in ("x86_64", "AMD64")


class Arena:
    """net/greeting.py SharedMemory: what is handed to peers of this host at the greeting."""

    def __init__(self, fd: int, slots: int = REGIONS, slot_bytes: int = REGION_BYTES) -> None:
        if (slots, slot_bytes) != (REGIONS, REGION_BYTES) or os.fstat(fd).st_size < slots * slot_bytes:
            raise ValueError("not the memory of a rank")
        self.fd = fd
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, slots * slot_bytes)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls) -> Arena:
        fd = os.memfd_create("holdfast-exchange", os.MFD_CLOEXEC)
        os.ftruncate(fd, REGIONS * REGION_BYTES)
        return cls(fd)

    def of_peer(self, fd: int, slots: int, slot_bytes: int) -> Arena:
        return Arena(fd, slots, slot_bytes)

    def region(self, view: int) -> Region:
        return Region(self, view)

    def begin(self, view: int) -> Region:
        """The owner's region of a view that begins: empty. What nobody of it can read any more is given back."""
        for number in (view, view + 2):  # the latter is that of two views ago
            start = number % REGIONS * REGION_BYTES
            self._map.madvise(mmap.MADV_REMOVE, start, REGION_BYTES)
        region = Region(self, view)
        region.words[_STAMP] = view
        return region

    def close(self) -> None:
        """Close the file; the memory goes with the last tensor over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Region:
    """One view's part of an arena, mine or a peer's."""

    def __init__(self, arena: Arena, view: int) -> None:
        self.view = view
        self._arena = arena  # keeps it mapped
        start = view % REGIONS * REGION_BYTES
        whole = memoryview(arena._map)
        self.words = whole[start : start + HEAD_BYTES].cast("Q")
        self.ring = whole[start + HEAD_BYTES : start + HEAP_AT]
        self.heap = arena.memory[start + HEAP_AT : start + REGION_BYTES]

    @property
    def is_current(self) -> bool:
        """Whether it still is what this view's members wrote."""
        return self.words[_STAMP] == self.view

    @property
    def head(self) -> int:
        return self.words[_HEAD]

    @property
    def asleep(self) -> bool:
        return self.words[_ASLEEP] != 0

    @asleep.setter
    def asleep(self, value: bool) -> None:
        self.words[_ASLEEP] = value

    def read_up_to(self, rank: int) -> int:
        """How far the owner has read the ring of this rank."""
        return self.words[_READ + rank]

    def note_read(self, rank: int, at: int) -> None:
        self.words[_READ + rank] = at

    def block(self, offset: int, length: int) -> torch.Tensor:
        if not 0 <= offset <= offset + length <= HEAP_BYTES:
            raise ProtocolError("a peer named memory that it does not share")
        return self.heap[offset : offset + length]

    def write(self, record: bytes, readers_at: int) -> bool:
        """Append to the ring. `readers_at`: how far all have read. False: there is no room yet."""
        size = -(-len(record) // 8) * 8
        head = self.words[_HEAD]
        at = head % RING_BYTES
        skipped = RING_BYTES - at if at + size > RING_BYTES else 0
        if head + skipped + size - readers_at > RING_BYTES:
            return False
        if skipped:
            if skipped >= HEAD.size:
                self.ring[at : at + HEAD.size] = HEAD.pack(HEAD.size, What.SKIP, 0, 0, 0, 0, 0, 0)
            at = 0
        self.ring[at : at + len(record)] = record
        self.words[_HEAD] = head + skipped + size  # last: whoever sees it sees the record
        return True

    def read(self, at: int) -> tuple[Record | None, int]:
        """The record at this place, and where the next one is. None: the ring begins anew there."""
        place = at % RING_BYTES
        left = RING_BYTES - place
        if left < HEAD.size:
            return None, at + left
        record = Record.decode(self.ring, place)
        if record.what is What.SKIP:
            return None, at + left
        size = HEAD.size + len(record.text) + len(record.data)
        return record, at + -(-size // 8) * 8
