"""Documents one after the other, in the order of an epoch, cut into sequences of one length. Pure index arithmetic.

Invariants: which tokens are in sequence k of an epoch follows from the documents' lengths and the epoch's order. Every
token of an epoch is in one sequence; the last one is filled up from the epoch's beginning. Owns caches of an epoch's
windows, which change no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from holdfast.data.streams.block_order import BlockOrder, Numbers

_CACHED = 4


class DocumentLengths:
    """Tokens of each document, by source, as their indices have them: mapped, not in memory."""

    def __init__(self, of_sources: Sequence[Numbers]) -> None:
        self._of_sources = list(of_sources)
        self._ends = numpy.cumsum([len(one) for one in of_sources])
        self.total = sum(int(one.sum()) for one in of_sources)

    def of(self, documents: Numbers) -> Numbers:
        sources = numpy.searchsorted(self._ends, documents, side="right")
        found = numpy.empty(len(documents), dtype=numpy.int64)
        for source in numpy.unique(sources):
            mine = sources == source
            first = int(self._ends[source - 1]) if source else 0
            found[mine] = self._of_sources[source][documents[mine] - first]
        return found

    def of_blocks(self, order: BlockOrder) -> Numbers:
        """Tokens of each block of the order, which does not cut across sources."""
        sums, first = [numpy.empty(0, dtype=numpy.int64)], 0
        for lengths, end in zip(self._of_sources, self._ends.tolist(), strict=True):
            firsts = order.starts[numpy.searchsorted(order.starts, first) : numpy.searchsorted(order.starts, end)]
            if len(firsts):
                sums.append(numpy.add.reduceat(lengths, firsts - first))
            first = end
        return numpy.concatenate(sums)


class Packing:
    """Sequences of `length` tokens from documents in an order."""

    def __init__(self, lengths: DocumentLengths, length: int, order: BlockOrder) -> None:
        self._lengths, self._length, self._order = lengths, length, order
        self._of_blocks = lengths.of_blocks(order)
        self._epochs: dict[int, Numbers] = {}
        self._windows: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

    def pieces(self, epoch: int, sequence: int) -> Iterator[tuple[int, int, int]]:
        """What a sequence is made of: document, and where the piece begins and ends in it."""
        at, wanted = sequence * self._length, self._length
        ends = self._window_ends(epoch)
        while wanted:
            at %= self._lengths.total
            window = int(numpy.searchsorted(ends, at, side="right"))
            documents, document_ends = self._window(epoch, window)
            begins = at - (int(ends[window - 1]) if window else 0)
            place = int(numpy.searchsorted(document_ends, begins, side="right"))
            first = int(document_ends[place - 1]) if place else 0
            taken = min(wanted, int(document_ends[place]) - begins)
            yield int(documents[place]), begins - first, begins - first + taken
            at, wanted = at + taken, wanted - taken

    def _window_ends(self, epoch: int) -> Numbers:
        found = self._epochs.get(epoch)
        if found is None:
            found = self._order.up_to_windows(epoch, self._of_blocks)
            _make_room(self._epochs)
            self._epochs[epoch] = found
        return found

    def _window(self, epoch: int, window: int) -> tuple[Numbers, Numbers]:
        found = self._windows.get((epoch, window))
        if found is None:
            documents = self._order.window_numbers(epoch, window)
            found = documents, numpy.cumsum(self._lengths.of(documents))
            _make_room(self._windows)
            self._windows[epoch, window] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}, "_windows": {}}


def _make_room(cache: dict[Any, Any]) -> None:
    while len(cache) >= _CACHED:
        cache.pop(next(iter(cache)))
