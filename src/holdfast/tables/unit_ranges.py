"""Which units of data a shard has had updates of, as ranges: so that one that is made again counts once. Pure.

Workers make units nearly in order, and most units touch every shard, so there are few ranges. Where there are many, the
oldest are forgotten: who goes back goes back by less.
"""

from __future__ import annotations

import bisect
from itertools import pairwise
from typing import Any, TypeAlias

from holdfast.core.errors import ProtocolError

UnitRanges: TypeAlias = tuple[tuple[int, int], ...]  # (first, behind the last), in order, with gaps between them
RANGES_MAX = 4096
UNIT_MAX = 1 << 52


def covers(ranges: UnitRanges, unit: int) -> bool:
    place = bisect.bisect_right(ranges, (unit, UNIT_MAX + 1))
    return place > 0 and ranges[place - 1][1] > unit


def with_unit(ranges: UnitRanges, unit: int) -> UnitRanges:
    if covers(ranges, unit):
        return ranges
    place = bisect.bisect_right(ranges, (unit, UNIT_MAX + 1))
    before, after, first, behind = list(ranges[:place]), list(ranges[place:]), unit, unit + 1
    if before and before[-1][1] == first:
        first = before.pop()[0]
    if after and after[0][0] == behind:
        behind = after.pop(0)[1]
    return tuple([*before, (first, behind), *after][-RANGES_MAX:])


def decode_ranges(told: Any) -> UnitRanges:
    """ProtocolError for what no shard encodes."""
    try:
        ranges = tuple((first, behind) for first, behind in told)
    except (TypeError, ValueError) as error:
        raise ProtocolError("not the units of a shard") from error
    edges = [edge for one in ranges for edge in one]
    ordered = all(type(edge) is int for edge in edges) and all(a < b for a, b in pairwise(edges))
    if len(ranges) > RANGES_MAX or not ordered or (edges and not 0 <= edges[0] <= edges[-1] <= UNIT_MAX + 1):
        raise ProtocolError("not the units of a shard")
    return ranges
