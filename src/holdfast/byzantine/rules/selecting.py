"""Rules that choose some of the updates by their distances: Krum, Multi-Krum, Bulyan, minimum-diameter averaging.

One pass for all distances (Gram matrix in whole numbers, kernels/columns.c), then decisions on n x n numbers, then
one pass for the value. Distances are those of the updates rounded to 23 bits of their largest coordinate in each
group of 128. Decisions are the same on any machine; ties go to the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from holdfast.byzantine.arithmetic import squared_distances, total
from holdfast.byzantine.gathering import Gathered
from holdfast.byzantine.kernels.port import Kind, Matrix, Order
from holdfast.byzantine.rules.covering import smallest_diameter
from holdfast.byzantine.rules.port import Outcome, Rule
from holdfast.byzantine.weighting import ratio
from holdfast.core.errors import ConfigError

LEFT_OUT = 2  # of the n - f nearest: oneself, and one more, as Blanchard et al. have it


def krum_scores(distances: Matrix, nearest: int) -> Matrix:
    """For each update the sum of the squared distances to its nearest others."""
    return total(np.sort(distances, axis=1)[:, 1 : 1 + max(nearest, 1)])


def _mean_of(gathered: Gathered, chosen: list[int]) -> Matrix:
    factors = np.zeros(gathered.n)
    factors[chosen] = 1.0 if gathered.weights is None else gathered.weights[chosen]
    mean: Matrix = factors / total(factors)
    return mean


def _krum_needs(f: int, left_out: int) -> int:
    return 2 * f + 2 * left_out - 1


def _krum_coefficient(n: int, f: int, left_out: int) -> float:
    return 6.0 * (n - f) / (n - 2 * f - left_out + 1)


def _check_left_out(left_out: int) -> None:
    if left_out not in (1, 2):
        raise ConfigError(f"left_out={left_out!r} is neither 1 nor 2", hint="2 is Krum as published")


@dataclass(frozen=True)
class Krum(Rule):
    """The one update whose n - f - 2 nearest others are nearest, by the sum of squared distances. Weights do not
    matter.

    Needs n >= 2f + 3. κ = 6 (n - f) / (n - 2f - 1): the best score is at most the mean score within S, and n - 2f - 1
    of those whom a score counts, itself included, are of S. With left_out=1 a score counts n - f - 1 others: n >= 2f
    + 1 and κ = 6 (1 + f / (n - 2f)), as in Allouah et al. 2023. Scores: those of Krum. Trusted: the one. Blanchard et
    al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS.
    """

    left_out: int = LEFT_OUT
    word: ClassVar[str] = "krum"

    def __post_init__(self) -> None:
        _check_left_out(self.left_out)

    def least(self, f: int) -> int:
        return _krum_needs(f, self.left_out)

    def coefficient(self, n: int, f: int) -> float:
        return _krum_coefficient(n, f, self.left_out)

    def run(self, gathered: Gathered) -> Outcome:
        scores = krum_scores(squared_distances(gathered.gram()), gathered.n - gathered.f - self.left_out)
        chosen = int(np.argmin(scores))
        result = gathered.combine(np.eye(gathered.n)[chosen])
        return Outcome(result, [number == chosen for number in range(gathered.n)], list(scores))


@dataclass(frozen=True)
class MultiKrum(Rule):
    """The mean, weighted if there are weights, of the n - f updates with the best scores of Krum, or of the best
    `keep`.

    Needs n >= 2f + 3, and keep <= n - f. κ is that of Krum: the scores of the best are on average at most those of S.
    Scores: those of Krum. Trusted: the chosen. Blanchard et al. 2017, as for Krum.
    """

    keep: int | None = None
    left_out: int = LEFT_OUT
    word: ClassVar[str] = "multi-krum"

    def __post_init__(self) -> None:
        _check_left_out(self.left_out)
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep={self.keep!r} leaves no update", hint="keep at least one")

    def least(self, f: int) -> int:
        return max(_krum_needs(f, self.left_out), f + (self.keep or 0))

    def coefficient(self, n: int, f: int) -> float:
        return _krum_coefficient(n, f, self.left_out)

    def run(self, gathered: Gathered) -> Outcome:
        keep = self.keep or gathered.n - gathered.f
        scores = krum_scores(squared_distances(gathered.gram()), gathered.n - gathered.f - self.left_out)
        chosen = sorted(int(number) for number in np.argsort(scores, kind="stable")[:keep])
        result = gathered.combine(_mean_of(gathered, chosen))
        return Outcome(result, [number in chosen for number in range(gathered.n)], list(scores))


@dataclass(frozen=True)
class Bulyan(Rule):
    """Krum chooses n - 2f updates, one after the other, each among those that are left; then, in every coordinate,
    the mean of the n - 4f of them that are nearest to their median.

    Needs n >= 4f + 3. Every coordinate is within twice the extent of any n - f updates of their mean, since more than
    half of the chosen are of S; so κ = 8 (n - f). Scores: when an update was chosen (0 for the first), n - 2f for the
    rest. Trusted: the chosen. El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium",
    ICML.
    """

    word: ClassVar[str] = "bulyan"

    def least(self, f: int) -> int:
        return 4 * f + 3

    def coefficient(self, n: int, f: int) -> float:
        return 8.0 * (n - f)

    def weight_ratio(self, n: int, f: int) -> float:
        return ratio(n - 2 * f, f)  # weights decide among the chosen

    def run(self, gathered: Gathered) -> Outcome:
        n, f = gathered.n, gathered.f
        turns = self._turns(squared_distances(gathered.gram()), f)
        chosen = sorted(turns)
        weights = None if gathered.weights is None else gathered.weights[chosen]
        few = gathered.mixed(np.eye(n)[chosen], weights)
        _, result = few.order(Order(Kind.NEAREST, len(chosen), f, kept=n - 4 * f))
        scores = [float(turns.get(number, len(chosen))) for number in range(n)]
        return Outcome(result, [number in turns for number in range(n)], scores)

    @staticmethod
    def _turns(distances: Matrix, f: int) -> dict[int, int]:
        left = list(range(len(distances)))
        turns: dict[int, int] = {}
        for turn in range(len(distances) - 2 * f):
            scores = krum_scores(distances[np.ix_(left, left)], len(left) - f - LEFT_OUT)
            turns[left.pop(int(np.argmin(scores)))] = turn
        return turns


@dataclass(frozen=True)
class MinimumDiameter(Rule):
    """The mean, weighted if there are weights, of the n - f updates of which no two are far apart (MDA).

    Needs n > 2f. |value - mean(S)| <= 2f / (n - f) · the diameter of S (Farhadkhani et al. 2022, "Byzantine Machine
    Learning Made Easy by Resilient Averaging of Momentums", ICML), and so κ = 8f² / (n - f). The subset is found by
    asking for which distance all pairs that are farther apart can be covered by f updates; of several subsets with
    the same diameter the first in the order of words. Scores: the largest distance to one of the chosen. Trusted: the
    chosen. El Mhamdi et al. 2021, "Distributed Momentum for Byzantine-resilient SGD", and Rousseeuw 1985.
    """

    word: ClassVar[str] = "mda"

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float:
        return 8.0 * f * f / (n - f)

    def run(self, gathered: Gathered) -> Outcome:
        distances = squared_distances(gathered.gram())
        chosen = smallest_diameter(distances.tolist(), gathered.f)
        result = gathered.combine(_mean_of(gathered, chosen))
        scores = np.sqrt(np.max(distances[:, chosen], axis=1))
        return Outcome(result, [number in chosen for number in range(gathered.n)], list(scores))
