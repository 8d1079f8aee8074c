"""The memory of a snapshot's tensors as one run of bytes: a virtual concatenation, never a real one.

It is cut into chunks of CHUNK_BYTES, the same on every worker: the unit in which a snapshot is sent, hashed and
checked. A snapshot's digest is made of its chunks' digests, so whoever has checked all chunks need not read again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
import xxhash

from holdfast.state.layout import memory_of

CHUNK_BYTES = 8 * 2**20
_PIECE_BYTES = 2**18  # hashed while it is in the cache: measured faster than 1 or 4 MiB
_PIECE_VIEWS = 64  # tiny tensors travel together; far below the kernel's IOV_MAX


class Space:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._views = [memory for memory in map(memory_of, tensors) if len(memory)]
        self._starts: list[int] = []
        self.nbytes = 0
        for view in self._views:
            self._starts.append(self.nbytes)
            self.nbytes += len(view)

    def chunks(self) -> list[tuple[int, int]]:
        return [(start, min(start + CHUNK_BYTES, self.nbytes)) for start in range(0, self.nbytes, CHUNK_BYTES)]

    def pieces(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """The memory of [start, stop) as lists of views, each list small enough to move and hash at once."""
        piece: list[memoryview] = []
        room = _PIECE_BYTES
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            offset = start - self._starts[index]
            view = self._views[index][offset : offset + min(room, stop - start)]
            piece.append(view)
            start += len(view)
            room -= len(view)
            if offset + len(view) == len(self._views[index]):
                index += 1
            if not room or len(piece) == _PIECE_VIEWS:
                yield piece
                piece, room = [], _PIECE_BYTES
        if piece:
            yield piece

    def digest(self, start: int, stop: int) -> bytes:
        hasher = xxhash.xxh3_128()
        for piece in self.pieces(start, stop):
            for view in piece:
                hasher.update(view)
        return hasher.digest()
