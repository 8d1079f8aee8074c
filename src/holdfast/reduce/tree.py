"""The shape of the canonical sum (pure).

Floating-point addition does not associate, so a step's sum over shards 0..V-1 has one shape, whoever computes
which shard: a binary tree over the range [0, V). A range is cut at the largest power of two below its length, so
every left part is a full tree and ranges line up however many workers there are.

A worker adds its own shards as far as this tree allows; what it then holds are the sums of a few ranges
(`cover`). Adding the ranges of all workers in `expression` order gives the same bits in every case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Range = tuple[int, int]  # shards [start, stop) whose sum is one node of the tree
Expression = int | tuple["Expression", "Expression"]  # a leaf's position in a sequence, or a sum of two


def split(node: Range) -> tuple[Range, Range]:
    """The two halves that a node is the sum of. Only for nodes of more than one shard."""
    start, stop = node
    length = stop - start
    assert length > 1, node
    middle = start + (1 << ((length - 1).bit_length() - 1))
    return (start, middle), (middle, stop)


@dataclass(frozen=True)
class Tree:
    """The tree over `shards` shards. `parents` maps each node but the root to (parent, sibling); none: only leaves."""

    shards: int
    parents: Mapping[Range, tuple[Range, Range]]

    @property
    def root(self) -> Range:
        return (0, self.shards)

    def cover(self, shards: Iterable[int]) -> tuple[Range, ...]:
        """The fewest nodes that together are exactly these shards, in order."""
        if not self.parents:
            return tuple((shard, shard + 1) for shard in sorted(shards))
        return _cover(self.shards, tuple(shards))

    def expression(self, nodes: Sequence[Range], *, partial: bool = False) -> Expression:
        """How to add these nodes, which must cover every shard once, up to the root.

        `partial`: shards may be missing. The rest is added in the same order, with what is missing cut out of the tree.
        """
        positions = {node: position for position, node in enumerate(nodes)}
        assert len(positions) == len(nodes), f"a node is there twice: {nodes}"
        used: list[int] = []
        result = self._expression(self.root, positions, used, partial)
        assert len(used) == len(nodes), f"nodes overlap: {nodes}"
        assert result is not None, "every shard is missing"
        return result

    def _expression(
        self, node: Range, positions: Mapping[Range, int], used: list[int], partial: bool
    ) -> Expression | None:
        position = positions.get(node)
        if position is not None:
            used.append(position)
            return position
        if node[1] - node[0] == 1:
            assert partial, f"shard {node[0]} is missing"
            return None
        left, right = (self._expression(half, positions, used, partial) for half in split(node))
        if left is None or right is None:
            return right if left is None else left
        return left, right


@lru_cache(maxsize=64)
def tree_over(shards: int) -> Tree:
    parents: dict[Range, tuple[Range, Range]] = {}
    todo = [(0, shards)]
    while todo:
        node = todo.pop()
        if node[1] - node[0] > 1:
            left, right = split(node)
            parents[left] = (node, right)
            parents[right] = (node, left)
            todo += [left, right]
    return Tree(shards, parents)


@lru_cache(maxsize=64)
def leaves_over(shards: int) -> Tree:
    """Where nothing is added up: every shard is a node by itself."""
    return Tree(shards, {})


@lru_cache(maxsize=4096)
def _cover(count: int, shards: tuple[int, ...]) -> tuple[Range, ...]:
    return tuple(_cover_in((0, count), frozenset(shards)))


def _cover_in(node: Range, wanted: frozenset[int]) -> list[Range]:
    inside = sum(1 for shard in range(*node) if shard in wanted)
    if inside == 0:
        return []
    if inside == node[1] - node[0]:
        return [node]
    left, right = split(node)
    return _cover_in(left, wanted) + _cover_in(right, wanted)
