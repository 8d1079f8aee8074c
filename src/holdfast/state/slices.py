"""The state in portions, to be compared with that of others a little at a time. Owns nothing.

A snapshot's tensors, one after the other, are cut into equal runs of bytes, the same on every worker whose state is the
same. The digest of a portion covers its bytes and everything in the snapshot that is not a tensor: settings, counters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash

from holdfast.state.codec import Tree, unpack_tree
from holdfast.state.layout import memory_of
from holdfast.state.snapshot import Snapshot

SLICE_BYTES = (
    128 * 2**20
)  # hashed in some 20 ms; to find what lies in it takes nearly as long where parameters are many


def slices_for(parameters_bytes: int) -> int:
    """How many portions. Known before the optimizer has any state, which for most is twice the parameters."""
    return max(1, 3 * parameters_bytes // SLICE_BYTES)


def slice_digest(snapshot: Snapshot, number: int, slices: int) -> str:
    """32 hex digits, for portion `number` of so many."""
    start, stop, total = _bounds(snapshot, number, slices)
    hasher = xxhash.xxh3_128()
    hasher.update(f"{snapshot.step} {number} {slices} {total} {len(snapshot.tree)} ".encode())
    hasher.update(snapshot.tree)
    for tensor, _, low, high in _within(snapshot, start, stop):
        hasher.update(memory_of(tensor)[low:high])
    return hasher.hexdigest()


def slice_names(snapshot: Snapshot, number: int, slices: int) -> str:
    """What lies in a portion, for people: `optimizer.state.0.exp_avg to parameters.head.weight`."""
    start, stop, _ = _bounds(snapshot, number, slices)
    numbers = [index for _, index, _, _ in _within(snapshot, start, stop)]
    names = dict(_names(unpack_tree(snapshot.tree), ""))
    found = [names.get(index, f"tensor {index}") for index in (*numbers[:1], *numbers[-1:])]
    return " to ".join(dict.fromkeys(found))


def _bounds(snapshot: Snapshot, number: int, slices: int) -> tuple[int, int, int]:
    total = snapshot.nbytes
    return total * number // slices, total * (number + 1) // slices, total


def _within(snapshot: Snapshot, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """The tensors that reach into [start, stop), their numbers, and where in each."""
    first = 0
    for index, tensor in enumerate(snapshot.tensors):
        size = tensor.numel() * tensor.element_size()
        if first < stop and first + size > start:
            yield tensor, index, max(0, start - first), min(size, stop - first)
        first += size


def _names(tree: Tree, path: str) -> Iterator[tuple[int, str]]:
    """Tensor numbers and where in the state each is."""
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _names(value, f"{path}{index}.")
    elif isinstance(tree, dict):
        if type(tree.get("T")) is int:
            yield tree["T"], path.rstrip(".")
        for key, value in tree.items():
            if key == "d":
                for name, item in value:
                    yield from _names(item, f"{path}{name}.")
            elif isinstance(value, list | dict):
                yield from _names(value, path)
