"""Memory that a worker shares with a server of its own host: payloads and answers pass through it instead of a socket.

It is an anonymous memory file, which the worker makes for one connection and passes with its greeting. It is sealed
against shrinking, so reading it cannot fail. The worker says in a request which part of it holds the payload, or takes
the answer. A part is used by one request at a time, and never again once a request was given up: a server that stood
still, and wakes, may still write to it. So the memory goes with its connection.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import defaultdict

import torch

from holdfast.core.errors import ProtocolError

SHARED_BYTES_MIN = 64 * 1024  # what is smaller goes through the socket
LINE_BYTES = 64


class WorkerMemory:
    """net.greeting.SharedMemory of one slot. Both sides have one, over the same file."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.slots = 1
        self.slot_bytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> WorkerMemory:
        nbytes = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("holdfast-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return cls(fd, nbytes)

    def of_peer(self, fd: int, slots: int, slot_bytes: int) -> WorkerMemory:
        return open_worker_memory(fd, slots, slot_bytes)

    def part(self, start: int, nbytes: int) -> memoryview:
        return memoryview(self._map)[start : start + nbytes]

    def copy_in(self, start: int, views: list[memoryview]) -> None:
        """These bytes, one after the other, without the interpreter's lock."""
        for view in views:
            if view.nbytes:
                self._bytes[start : start + view.nbytes].copy_(_tensor(view))
                start += view.nbytes

    def copy_out(self, start: int, views: list[memoryview]) -> None:
        for view in views:
            if view.nbytes:
                _tensor(view).copy_(self._bytes[start : start + view.nbytes])
                start += view.nbytes

    def check(self, start: object, nbytes: object) -> tuple[int, int]:
        """A part that the other side has named. ProtocolError if there is none such."""
        if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
            raise ProtocolError("a part of shared memory that cannot be")
        if start % LINE_BYTES or start + nbytes > self.slot_bytes:
            raise ProtocolError("a part of shared memory that cannot be")
        return start, nbytes

    def close(self) -> None:
        """The memory goes when the last view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_worker_memory(fd: int, slots: int, slot_bytes: int) -> WorkerMemory:
    """Behind a descriptor that a worker has passed. ValueError or OSError if it is none, or could shrink."""
    if slots != 1 or os.fstat(fd).st_size < slot_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("this memory is not a worker's")
    return WorkerMemory(fd, slot_bytes)


class NoMemory:
    """What a server passes itself: nothing. It opens what workers pass."""

    fd = -1
    slots = 1
    slot_bytes = 0

    def of_peer(self, fd: int, slots: int, slot_bytes: int) -> WorkerMemory:
        return open_worker_memory(fd, slots, slot_bytes)

    def close(self) -> None:
        pass


class Parts:
    """Which parts of such a memory are free. The one that was used last is used next: it is still in the cache."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by their size
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Where it begins; None: there is no room."""
        size = _rounded(nbytes)
        if not self._free[size] and self._end + size <= self._nbytes:
            self._free[size].append(self._end)
            self._end += size
        fitting = [one for one, starts in self._free.items() if starts and one >= size]
        if not fitting:
            return None
        start = self._free[min(fitting)].pop()
        self._taken[start] = min(fitting)
        return start

    def give_back(self, start: int) -> None:
        self._free[self._taken.pop(start)].append(start)


def _rounded(nbytes: int) -> int:
    """Up, by a sixteenth at most or to a page: slices are of nearly the same size, and share their parts so."""
    grain = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // grain) * grain


def _tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
