"""Sorting networks: which rows to compare, in which order, so that every column of a tile is sorted at once.

Batcher's odd-even merge sort, for any number of rows. A comparator (i, j) leaves the smaller number in i.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

Comparator = tuple[int, int]


@lru_cache(maxsize=256)
def sorting_network(rows: int, wanted: frozenset[int] | None = None) -> tuple[Comparator, ...]:
    """All comparators for so many rows; with `wanted` only those on which these places of the sorted order depend."""
    found: list[Comparator] = []
    half = 1
    while half < rows:
        apart = half
        while apart >= 1:
            for first in range(apart % half, rows - apart, 2 * apart):
                for low in range(first, first + min(apart, rows - first - apart)):
                    if low // (2 * half) == (low + apart) // (2 * half):
                        found.append((low, low + apart))
            apart //= 2
        half *= 2
    return tuple(found) if wanted is None else _pruned(found, wanted)


def _pruned(comparators: list[Comparator], wanted: Collection[int]) -> tuple[Comparator, ...]:
    live = set(wanted)
    kept: list[Comparator] = []
    for low, high in reversed(comparators):
        if low in live or high in live:
            live |= {low, high}
            kept.append((low, high))
    return tuple(reversed(kept))
