"""Memory for payloads, which is used again: fresh pages cost as much as the bytes that are read into them.

A `Buffer` is held by whoever needs it (the log, a frame on its way), and counts them. When nobody does, it goes back to
the pool. Owned by one thread.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from dataclasses import dataclass

from holdfast.servers.replicated import Head, Payload

PAGE_BYTES = mmap.PAGESIZE
HELD_BYTES_MAX = 256 * 1024 * 1024


class PoolShare:
    """A part of a pool's use that is counted by itself."""

    def __init__(self) -> None:
        self.used_bytes = 0


class Buffer:
    """`whole` is the buffer of which this one is a part."""

    def __init__(
        self,
        pool: BufferPool,
        memory: memoryview,
        nbytes: int,
        whole: Buffer | None = None,
        share: PoolShare | None = None,
    ) -> None:
        self._pool = pool
        self.share = share
        self.memory = memory
        self.view = memory[:nbytes]
        self._whole = whole
        self._holders = 1

    def part(self, start: int, nbytes: int) -> Buffer:
        """Some of it, held by itself."""
        self.hold()
        return Buffer(self._pool, self.view[start : start + nbytes], nbytes, self)

    def hold(self) -> None:
        assert self._holders > 0
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        assert self._holders >= 0
        if not self._holders:
            if self._whole is not None:
                self._whole.release()
            else:
                self._pool.take_back(self)


class BufferPool:
    """`used_bytes`: handed out now. What nobody uses is kept, up to `held_bytes_max` together with that."""

    def __init__(self, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._held_bytes_max = held_bytes_max
        self._idle: defaultdict[int, list[memoryview]] = defaultdict(list)
        self.idle_bytes = 0
        self.used_bytes = 0

    def get(self, nbytes: int, share: PoolShare | None = None) -> Buffer:
        """OSError if the machine does not have so much."""
        rounded = -(-max(1, nbytes) // PAGE_BYTES) * PAGE_BYTES
        if idle := self._idle[rounded]:
            self.idle_bytes -= rounded
            memory = idle.pop()
        else:
            memory = memoryview(mmap.mmap(-1, rounded))
        self.used_bytes += rounded
        if share is not None:
            share.used_bytes += rounded
        self._make_room()
        return Buffer(self, memory, nbytes, share=share)

    def take_back(self, buffer: Buffer) -> None:
        rounded = buffer.memory.nbytes
        self.used_bytes -= rounded
        if buffer.share is not None:
            buffer.share.used_bytes -= rounded
        self._idle[rounded].append(buffer.memory)
        self.idle_bytes += rounded
        self._make_room()

    def _make_room(self) -> None:
        """Let go of what nobody uses, until all of it is within the bound."""
        for rounded, idle in self._idle.items():
            while idle and self.used_bytes + self.idle_bytes > self._held_bytes_max:
                idle.pop()
                self.idle_bytes -= rounded


@dataclass(frozen=True)
class KeptPayload:
    """A payload, and the memory that it is in; None: of a payload without a body."""

    head: Head
    buffer: Buffer | None

    @property
    def payload(self) -> Payload:
        return Payload(self.head, self.buffer.view if self.buffer is not None else memoryview(b""))

    def hold(self) -> None:
        if self.buffer is not None:
            self.buffer.hold()

    def release(self) -> None:
        if self.buffer is not None:
            self.buffer.release()
