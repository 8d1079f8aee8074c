"""A worker's own sums: any order of shards and any split gives the tree's bits; gaps and dtypes are kept apart."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout, slice_bounds
from holdfast.reduce.sums import Sums
from holdfast.reduce.tree import Range, split, tree_over

SHAPES = [(3, 5), (7,), (), (2, 2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.int64]


def shard_tensors(shard: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(shard)
    tensors: list[torch.Tensor | None] = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        tensors.append((torch.randn(shape, generator=generator) * 100).to(dtype))
    if shard % 3 == 1:
        tensors[1] = None
    if shard % 4 == 2:
        tensors[0] = -torch.zeros(3, 5)  # negative zeros must not survive where zeros are added to them
    return tensors


def expected(node: Range) -> list[torch.Tensor]:
    if node[1] - node[0] == 1:
        found = shard_tensors(node[0])
        return [
            torch.zeros(shape, dtype=dtype) if tensor is None else tensor
            for tensor, shape, dtype in zip(found, SHAPES, DTYPES, strict=True)
        ]
    left, right = split(node)
    return [a + b for a, b in zip(expected(left), expected(right), strict=True)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bits(tensor.reshape(1))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 17), st.randoms(use_true_random=False))
def test_sums_are_those_of_the_tree_in_any_order(shards: int, rng: random.Random) -> None:
    layout = Layout([torch.empty(shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)])
    arena = Arena.create(shards, layout.slot_bytes)
    sums = Sums(arena, shards, parities=1)
    sums.begin(0, layout)
    mine = rng.sample(range(shards), rng.randint(1, shards))
    for shard in mine:
        tensors = shard_tensors(shard)
        sums.add(shard, tensors, [index for index, tensor in enumerate(tensors) if tensor is not None])
    assert tuple(node for node, _ in sums.nodes()) == tree_over(shards).cover(sorted(mine))
    for node, slot in sums.nodes():
        for found, right in zip(layout.views(arena.slot(slot, layout)), expected(node), strict=True):
            assert bits(found) == bits(right), (node, found, right)
    arena.close()


def test_a_step_begun_again_keeps_its_sums_and_a_new_one_does_not() -> None:
    layout = Layout([torch.empty(4)])
    arena = Arena.create(8, layout.slot_bytes)
    sums = Sums(arena, 4, parities=2)
    sums.begin(6, layout)
    sums.add(1, [torch.ones(4)], [0])
    sums.begin(6, layout)
    assert sums.nodes() == [((1, 2), 0)]
    sums.begin(7, layout)
    assert sums.nodes() == [] and sums.present == set()
    sums.add(0, [torch.full((4,), 2.0)], [0])
    (_, slot), *_ = sums.nodes()
    assert slot == 4  # the other half: a slower peer may still read step 6
    assert torch.equal(layout.views(arena.slot(0, layout))[0], torch.ones(4))
    arena.close()


def test_sparse_gradients_get_one_sentence() -> None:
    layout = Layout([torch.empty(4, 2)])
    arena = Arena.create(2, layout.slot_bytes)
    sums = Sums(arena, 2, parities=1)
    sums.begin(0, layout)
    with pytest.raises(ConfigError, match="sparse"):
        sums.add(0, [torch.eye(4, 2).to_sparse()], [0])
    arena.close()


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_slices_cover_everything_once(elements: int, parts: int, itemsize: int) -> None:
    bounds = slice_bounds(elements, parts, itemsize)
    assert bounds[0][0] == 0 and bounds[-1][1] == elements
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert max(stop - start for start, stop in bounds) <= -(-elements // parts) + 64 // itemsize


def test_an_arena_outlives_its_owners_descriptor_and_shows_its_stamp() -> None:
    import os

    arena = Arena.create(3, 4096)
    twin = Arena(os.dup(arena.fd), 3, 4096)
    arena.set_stamp(7, 123_456_789)
    arena.memory[5000] = 42
    arena.close()
    assert twin.stamp == (7, 123_456_789)
    assert int(twin.memory[5000]) == 42
    twin.close()


def test_an_arena_that_claims_more_than_its_file_is_refused() -> None:
    import os

    arena = Arena.create(1, 4096)
    with pytest.raises(ValueError, match="smaller"):
        Arena(os.dup(arena.fd), 100, 4096)
    arena.close()
