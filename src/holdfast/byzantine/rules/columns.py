"""Rules that treat every coordinate by itself: median, trimmed mean, mean around the median.

One pass over the updates. Scores: the part of the coordinates (looked at in one group of eight, and where not all are
equal) in which an update is not among the n - 2f in the middle. An update is trusted unless that is more than half
way between 2f / n, which it is for anybody if all are alike, and always. The bits do not depend on the processor, the
threads or how columns are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.byzantine.gathering import Gathered
from holdfast.byzantine.kernels.port import Kind, Order
from holdfast.byzantine.rules.port import Outcome, Rule, halfway


def _ordered(gathered: Gathered, order: Order) -> Outcome:
    outside, result = gathered.order(order)
    limit = halfway(order.trim, order.rows)
    return Outcome(result, [bool(score <= limit) for score in outside], [float(score) for score in outside])


@dataclass(frozen=True)
class Median(Rule):
    """The coordinate-wise median; of an even number the mean of the middle two. With weights, the weighted median.

    Needs n > 2f. κ = n / (n - 2f): if the median of a coordinate is above S's mean, at least n / 2 - f of S are not
    below the median, and the mean of a part p of all numbers is at most √((1 - p) / p) standard deviations off theirs
    (Cauchy and Schwarz). Allouah et al. 2023 have 4 (1 + f / (n - 2f))², which is more. Yin et al. 2018,
    "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML.
    """

    word: ClassVar[str] = "median"

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float:
        return n / (n - 2 * f)

    def run(self, gathered: Gathered) -> Outcome:
        return _ordered(gathered, Order(Kind.MEDIAN, gathered.n, gathered.f))


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """In every coordinate the mean without the f smallest and the f largest; what is left is weighted, if there are
    weights.

    Needs n > 2f. κ = f / (n - 2f), which no rule can better: the j-th number that is left lies between the j-th and
    the (j + f)-th of S, so the value lies between the means of the n - 2f smallest and of the n - 2f largest of S,
    and these are at most √(f / (n - 2f)) standard deviations off S's mean, as for the median. Allouah et al. 2023
    have 6f / (n - 2f) · (1 + f / (n - 2f)), which is more. Yin et al. 2018, as for the median.
    """

    word: ClassVar[str] = "trimmed-mean"

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float:
        return f / (n - 2 * f)

    def run(self, gathered: Gathered) -> Outcome:
        return _ordered(gathered, Order(Kind.TRIMMED, gathered.n, gathered.f))


@dataclass(frozen=True)
class MeaMed(Rule):
    """In every coordinate the mean of the n - f that are nearest to the median; of two at the same distance the
    smaller.

    Needs n > 2f. κ = 8f² / (n - f): at most f of the n - f are not of S, each of them is no farther from the median
    than one of S that it stands for, so the two means differ by at most 2f / (n - f) times S's extent in that
    coordinate, whose square is at most twice the sum of squared deviations. Xie et al. 2018, "Generalized
    Byzantine-tolerant SGD".
    """

    word: ClassVar[str] = "meamed"

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float:
        return 8.0 * f * f / (n - f)

    def run(self, gathered: Gathered) -> Outcome:
        return _ordered(gathered, Order(Kind.NEAREST, gathered.n, gathered.f, kept=gathered.n - gathered.f))
