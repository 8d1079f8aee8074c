"""The canonical sum has one shape, however the shards are spread."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.reduce.arithmetic import mean_into, program
from holdfast.reduce.tree import Range, split, tree_over


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A number of shards, and which worker has which of them."""
    shards = draw(st.integers(1, 40))
    workers = draw(st.integers(1, 7))
    owners = draw(st.lists(st.integers(0, workers - 1), min_size=shards, max_size=shards))
    return shards, [[shard for shard in range(shards) if owners[shard] == worker] for worker in range(workers)]


def canonical(values: list[torch.Tensor], node: Range) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = split(node)
    return canonical(values, left) + canonical(values, right)


@given(st.integers(1, 300))
def test_every_left_half_is_a_full_tree(shards: int) -> None:
    for node in tree_over(shards).parents:
        if node[1] - node[0] > 1:
            left, right = split(node)
            size = left[1] - left[0]
            assert size & (size - 1) == 0 and right[1] - right[0] <= size


@given(partitions())
def test_covers_are_the_shards_and_as_few_nodes_as_can_be(case: tuple[int, list[list[int]]]) -> None:
    shards, owned = case
    tree = tree_over(shards)
    for mine in owned:
        nodes = tree.cover(mine)
        assert [shard for node in nodes for shard in range(*node)] == mine
        for node in nodes:  # no two of them are siblings, which would be one node
            assert node == tree.root or tree.parents[node][1] not in nodes


@given(partitions(), st.integers(0, 2**32))
def test_the_sum_has_the_same_bits_for_every_partition(case: tuple[int, list[list[int]]], seed: int) -> None:
    shards, owned = case
    tree = tree_over(shards)
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(33, generator=generator) * 10.0 ** (shard % 7) for shard in range(shards)]
    nodes = tuple(sorted(node for mine in owned for node in tree.cover(mine)))
    operands = [canonical(values, node) for node in nodes]
    out = torch.empty(33)
    mean_into(out, operands, nodes, shards, 0, 33)
    assert torch.equal(out, canonical(values, tree.root) / shards)


@given(partitions())
def test_a_program_needs_few_temporaries(case: tuple[int, list[list[int]]]) -> None:
    shards, owned = case
    nodes = tuple(sorted(node for mine in owned for node in tree_over(shards).cover(mine)))
    operations, temporaries = program(shards, nodes)
    assert len(operations) == len(nodes) - 1
    assert temporaries <= max(1, shards).bit_length() + 1


def test_a_shard_that_is_missing_or_there_twice_is_our_own_bug() -> None:
    tree = tree_over(4)
    for nodes in [((0, 2),), ((0, 2), (2, 3)), ((0, 2), (0, 1), (2, 4))]:
        try:
            tree.expression(nodes)
        except AssertionError:
            continue
        raise AssertionError(f"{nodes} passed")
