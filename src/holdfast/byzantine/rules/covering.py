"""The n - f points of which no two are far apart, exactly.

A diameter suffices if the pairs that are farther apart have a cover of at most f points. Looking for one branches on
a point with the most such pairs: it is in the cover, or all its partners are. That takes time in f, not in the number
of subsets.
"""

from __future__ import annotations

from collections.abc import Sequence


def smallest_diameter(distances: Sequence[Sequence[float]], f: int) -> list[int]:
    """The subset of n - f points with the smallest diameter; of several the first in the order of words."""
    n = len(distances)
    candidates = sorted({distances[i][j] for i in range(n) for j in range(i)} | {0.0})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _coverable(_far(distances, candidates[middle]), f):
            high = middle
        else:
            low = middle + 1
    return _first_subset(_far(distances, candidates[low]), f)


def _far(distances: Sequence[Sequence[float]], limit: float) -> list[set[int]]:
    n = len(distances)
    return [{j for j in range(n) if j != i and distances[i][j] > limit} for i in range(n)]


def _first_subset(far: list[set[int]], f: int) -> list[int]:
    n, chosen, removed = len(far), list[int](), set[int]()
    for point in range(n):
        if point in removed:
            continue
        if len(chosen) == n - f:
            break
        out = removed | far[point]
        if len(out) <= f and _coverable(_without(far, out), f - len(out)):
            chosen.append(point)
            removed = out
        else:
            removed = removed | {point}
    return chosen


def _without(far: list[set[int]], out: set[int]) -> list[set[int]]:
    return [set() if point in out else others - out for point, others in enumerate(far)]


def _coverable(far: list[set[int]], most: int) -> bool:
    """Whether so many points touch all pairs."""
    if most < 0:
        return False
    point = max(range(len(far)), key=lambda number: len(far[number]), default=-1)
    degree = len(far[point]) if far else 0
    if degree == 0:
        return True
    pairs = sum(map(len, far)) // 2
    if pairs > most * degree:
        return False
    if degree <= 2:
        return _paths_and_cycles(far) <= most
    if _coverable(_without(far, {point}), most - 1):
        return True
    return degree <= most and _coverable(_without(far, set(far[point])), most - degree)


def _paths_and_cycles(far: list[set[int]]) -> int:
    """The size of a smallest cover where no point has more than two pairs."""
    seen: set[int] = set()
    size = 0
    for start in range(len(far)):
        if start in seen or not far[start]:
            continue
        component, ends = [start], 0
        seen.add(start)
        for point in component:
            ends += len(far[point])
            fresh = far[point] - seen
            seen |= fresh
            component.extend(sorted(fresh))
        size += -(-(ends // 2) // 2)
    return size
