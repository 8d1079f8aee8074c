"""Reductions whose shape does not follow the number of ranks: a fixed number of shards, dealt to the ranks. Pure.

A step has so many shards, and their sum is the canonical tree over them (reduce/tree.py). Each rank has a run of
neighbours, adds up what the tree allows, and brings the nodes that it is left with: any number of ranks comes to the
same additions.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.reduce.tree import Range, tree_over


def shards_of(rank: int, size: int, shards: int) -> range:
    """Those of one rank: neighbours, and at most one more than another rank has."""
    return range(shards * rank // size, shards * (rank + 1) // size)


def nodes_of(mine: range, shards: int) -> tuple[Range, ...]:
    """What is left of a rank's shards when it has added up what it can."""
    return tree_over(shards).cover(mine)


def misfit(shards: int, brought: Iterable[tuple[int, tuple[Range, ...]]], *, whole: bool) -> str:
    """Why what ranks bring (rank, nodes) is not the tree over so many shards; `whole`: none may be missing."""
    tree, owner = tree_over(shards), [-1] * shards
    for rank, nodes in brought:
        for node in nodes:
            if node != tree.root and node not in tree.parents:
                return f"rank {rank} brings the shards {list(range(*node))}, which are not added up together"
            for shard in range(*node):
                if owner[shard] >= 0:
                    return f"ranks {owner[shard]} and {rank} both bring shard {shard}"
                owner[shard] = rank
    if whole and -1 in owner:
        return f"no rank brings shard {owner.index(-1)}"
    return "" if any(rank >= 0 for rank in owner) else "no rank brings any shard"
