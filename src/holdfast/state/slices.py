"""The state in portions, to be compared with that of others a little at a time. Owns nothing.

A snapshot's tensors, one after the other, are cut into equal runs of bytes, the same on every worker whose state is the
same. The digest of a portion covers its bytes and everything in the snapshot that is not a tensor: settings, counters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import torch
import xxhash

from holdfast.devices.copies import CPU, Download, Downloads
from holdfast.state.codec import Tree, pairs_of, unpack_tree
from holdfast.state.layout import as_bytes, memory_of
from holdfast.state.snapshot import Snapshot

SLICE_BYTES = 128 * 2**20  # hashed in 20 ms; to find what lies in it takes as long where parameters are many
PARTS = 16
_WHOLE_DIGITS, _MARK_DIGITS = 32, 8


def slices_for(parameters_bytes: int) -> int:
    """How many portions. Known before the optimizer has any state, which for most is twice the parameters."""
    return max(1, 3 * parameters_bytes // SLICE_BYTES)


def slice_digest(snapshot: Snapshot, number: int, slices: int) -> str:
    """For portion `number` of so many: 32 hex digits for all of it, then 8 for each PARTS-th, to find what differs."""
    return Portion(snapshot, number, slices).digest()


class Portion:
    """Portion `number` of so many. With `downloads`, its bytes on a device are put together there as they are now, and
    come in one piece."""

    def __init__(self, snapshot: Snapshot, number: int, slices: int, downloads: Downloads | None = None) -> None:
        self._bytes = _Bytes(snapshot, number, slices)
        head = f"{snapshot.step} {number} {slices} {self._bytes.total} {len(snapshot.tree)} "
        self._head = head.encode() + snapshot.tree
        self._coming: Download | None = None
        there = [cut for cut in self._cuts() if snapshot.tensors[cut[0]].device != CPU] if downloads else []
        if downloads is not None and there:
            cuts = [as_bytes(snapshot.tensors[tensor])[first:last] for tensor, first, last in there]
            self._coming = downloads.begin([torch.cat(cuts)])
        ends = accumulate(last - first for _, first, last in there)
        self._offsets = {cut: end - (cut[2] - cut[1]) for cut, end in zip(there, ends, strict=True)}

    def digest(self) -> str:
        """See `slice_digest`. Waits for what is still on its way."""
        came = memoryview(b"")
        if self._coming is not None:
            self._coming.wait()
            came = memory_of(self._coming.tensors[0])
        whole = xxhash.xxh3_128(self._head)
        marks = []
        for start, stop in self._bytes.parts:
            hasher = xxhash.xxh3_128()
            for cut in self._bytes.within(start, stop):
                tensor, first, last = cut
                at = self._offsets.get(cut)
                hasher.update(self._bytes.memory(tensor)[first:last] if at is None else came[at : at + last - first])
            whole.update(hasher.digest())
            marks.append(hasher.hexdigest()[:_MARK_DIGITS])
        return str(whole.hexdigest() + "".join(marks))

    def _cuts(self) -> Iterator[tuple[int, int, int]]:
        for start, stop in self._bytes.parts:
            yield from self._bytes.within(start, stop)


def difference(snapshot: Snapshot, number: int, slices: int, one: str, other: str) -> str:
    """Where two digests of a portion differ, for people: `parameters.head.weight`, `settings`."""
    portion = _Bytes(snapshot, number, slices)
    parts = [bounds for part, bounds in enumerate(portion.parts) if _mark(one, part) != _mark(other, part)]
    if not parts:
        return "settings"  # what is not a tensor
    numbers = [tensor for bounds in parts for tensor, _, _ in portion.within(*bounds)]
    names = dict(_names(unpack_tree(snapshot.tree), ""))
    found = [names.get(tensor, f"tensor {tensor}") for tensor in (*numbers[:1], *numbers[-1:])]
    return " to ".join(dict.fromkeys(found))


def _mark(digest: str, part: int) -> str:
    first = _WHOLE_DIGITS + part * _MARK_DIGITS
    return digest[first : first + _MARK_DIGITS]


class _Bytes:
    """A snapshot's tensors as one run of bytes, of which a portion is looked at."""

    def __init__(self, snapshot: Snapshot, number: int, slices: int) -> None:
        self._tensors = snapshot.tensors
        self._starts = [0]
        for tensor in snapshot.tensors:
            self._starts.append(self._starts[-1] + tensor.numel() * tensor.element_size())
        self.total = self._starts[-1]
        start, stop = self.total * number // slices, self.total * (number + 1) // slices
        size = stop - start
        self.parts = [(start + size * part // PARTS, start + size * (part + 1) // PARTS) for part in range(PARTS)]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The numbers of the tensors that reach into [start, stop), and where in each."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            if start < end:
                yield number, start - first, end - first
                start = end
            number += 1

    def memory(self, number: int) -> memoryview:
        return memory_of(self._tensors[number])


def _names(tree: Tree, path: str) -> Iterator[tuple[int, str]]:
    """Tensor numbers and where in the state each is."""
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _names(value, f"{path}{index}.")
    elif isinstance(tree, dict):
        if type(tree.get("T")) is int:
            yield tree["T"], path.rstrip(".")
        if (pairs := pairs_of(tree)) is not None:
            for name, item in pairs:
                yield from _names(item, f"{path}{name}.")
            return
        for value in tree.values():
            if isinstance(value, list | dict):
                yield from _names(value, path)
