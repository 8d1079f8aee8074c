"""Numbers over time in bounded memory: values are gathered into points, and twice as many into each when it gets full.

Pure. A point keeps the least and the greatest of its values, so that a spike stays visible however coarse it gets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

POINTS_MAX = 600
MARKS_MAX = 200
BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Series:
    """`points` are [time of the first value, step of the last, mean, least, greatest, number of the last event]."""

    __slots__ = ("_in_last", "_sum", "coarsened", "points", "stride")

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self.stride = 1  # values in each point
        self.coarsened = 0  # by the event with this number
        self._in_last = 0
        self._sum = 0.0

    def add(self, at: float, step: int, value: float, number: int) -> None:
        if not -math.inf < value < math.inf:
            return
        if self._in_last and self._in_last < self.stride:
            self._in_last += 1
            self._sum += value
            point = self.points[-1]
            point[1], point[2], point[5] = step, self._sum / self._in_last, number
            if value < point[3]:
                point[3] = value
            elif value > point[4]:
                point[4] = value
            return
        if len(self.points) >= POINTS_MAX:
            self._coarsen()
            self.coarsened = number
        self._in_last, self._sum = 1, value
        self.points.append([at, step, value, value, value, number])

    def _coarsen(self) -> None:
        """Two points into one. Each has `stride` values, the last one too: a new one is about to begin."""
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [
            [one[0], two[1], (one[2] + two[2]) / 2, min(one[3], two[3]), max(one[4], two[4]), two[5]]
            for one, two in pairs
        ]
        self.stride *= 2

    def picture(self, since: int = 0) -> dict[str, Any]:
        """What has changed since the event with this number: the points from the place `from` on."""
        first = len(self.points)
        if self.coarsened > since:
            first = 0
        while first > 0 and self.points[first - 1][5] > since:
            first -= 1
        return {
            "from": first,
            "points": [
                [round(at, 3), int(step), *(float(f"{value:.6g}") for value in (mean, least, greatest))]
                for at, step, mean, least, greatest, _ in self.points[first:]
            ],
        }


class Histogram:
    """How many durations were at most as long as each of BUCKETS_S, and how many were longer."""

    def __init__(self, durations_s: Iterable[float] = ()) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0
        for seconds in durations_s:
            self.add(seconds)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass
class Mark:
    """Something that happened to the run, or several such things that were close to each other."""

    at: float
    kind: str
    worker: str
    text: str
    step: int
    count: int = 1
    until: float = 0.0


class Marks:
    """Failures and the like, at most MARKS_MAX: beyond that the two closest of a kind become one."""

    def __init__(self) -> None:
        self.all: list[Mark] = []
        self.changed = 0

    def add(self, mark: Mark, number: int) -> None:
        mark.until = mark.at
        self.all.append(mark)
        self.changed = number
        if len(self.all) > MARKS_MAX:
            self._join_closest()

    def _join_closest(self) -> None:
        best, chosen = math.inf, None
        last: dict[str, Mark] = {}
        for mark in self.all[:-1]:
            before = last.get(mark.kind)
            if before is not None and mark.until - before.at < best:
                best, chosen = mark.until - before.at, (before, mark)
            last[mark.kind] = mark
        if chosen is None:  # as many kinds as marks: cannot be, but nothing grows without end
            del self.all[0]
            return
        kept, given = chosen
        kept.count += given.count
        kept.until = max(kept.until, given.until)
        self.all.remove(given)

    def picture(self) -> list[dict[str, Any]]:
        return [
            {
                "t": round(mark.at, 3),
                "until": round(mark.until, 3),
                "kind": mark.kind,
                "worker": mark.worker,
                "text": mark.text,
                "step": mark.step,
                "count": mark.count,
            }
            for mark in self.all
        ]


def number_of(value: object, default: float = 0.0) -> float:
    """A finite number out of a field, whatever is in it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            as_float = float(value)
        except OverflowError:
            return default
        return as_float if math.isfinite(as_float) else default
    return default
