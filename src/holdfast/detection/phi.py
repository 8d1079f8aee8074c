"""Phi accrual: how unlikely a silence is, by the past of the one that is silent. Pure.

`phi` is minus the decimal logarithm of the chance that something which was always there after so long, give or take so
much, is still to come: 1 means one in ten, 8 one in a hundred million. What is usual is learned from the last few
hundred intervals of this one worker. A long gap that turned out harmless is one of them, and makes for patience.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 256  # intervals that are remembered
INTERVAL_S_MAX = 600.0  # a longer one counts as so long: one pause over night must not excuse everything for ever
PHI_MAX = 1e6


@dataclass(frozen=True)
class IntervalHistory:
    """What is known of one kind of interval: how many, how long, give or take, and the longest of them."""

    count: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0
    longest_s: float = 0.0


class Intervals:
    """The last intervals of one kind. Belongs to one thread."""

    def __init__(self, window: int = WINDOW) -> None:
        self._kept: deque[float] = deque(maxlen=window)
        self._count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, interval_s: float) -> None:
        interval_s = min(max(interval_s, 0.0), INTERVAL_S_MAX)
        if len(self._kept) == self._kept.maxlen:
            oldest = self._kept[0]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._kept.append(interval_s)
        self._count += 1
        self._sum += interval_s
        self._squares += interval_s * interval_s

    def history(self) -> IntervalHistory:
        size = len(self._kept)
        if not size:
            return IntervalHistory()
        mean_s = max(0.0, self._sum / size)
        variance = max(0.0, self._squares / size - mean_s * mean_s)  # rounding may take it below
        return IntervalHistory(self._count, mean_s, math.sqrt(variance), max(self._kept))


def phi(silence_s: float, history: IntervalHistory, *, deviation_s_min: float) -> float:
    """How suspicious a silence is. Without a history nothing is."""
    if not history.count:
        return 0.0
    deviation_s = max(history.deviation_s, deviation_s_min)
    return tail((silence_s - history.mean_s) / deviation_s)


def tail(deviations: float) -> float:
    """-log10 of the chance that a normal variable lies further out than that."""
    if deviations < 6.0:
        return -math.log10(0.5 * math.erfc(deviations / math.sqrt(2.0)))
    # Far out the chance is too small for a float; this is Mills' bound, which lies just below the truth.
    inside = deviations / ((deviations * deviations + 1.0) * math.sqrt(2.0 * math.pi))
    return min(PHI_MAX, deviations * deviations / 2.0 / math.log(10.0) - math.log10(inside))
