"""Rules that look for a centre of the updates: mean, geometric median, centered clipping, the covariance filter.

Every point that they come by is a combination of the updates, so its distances follow from the Gram matrix: one pass
over the updates for that, n x n numbers for the search, one pass for the value. The Gram matrix is around the median
of every coordinate, so that a hostile update, however far away, takes no precision from the distances of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from holdfast.byzantine.arithmetic import leading_eigenvector, product, squared_distances_to, total
from holdfast.byzantine.gathering import Gathered
from holdfast.byzantine.kernels.port import Kind, Matrix, Order
from holdfast.byzantine.rules.port import Outcome, Rule
from holdfast.byzantine.updates import Result, as_result
from holdfast.byzantine.weighting import UNBOUNDED, ratio
from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class Mean(Rule):
    """The mean, weighted if there are weights. For comparison: one hostile update takes it anywhere.

    Needs n > f. κ = 0 for f = 0, else none. Up to f updates that are not finite are taken out all the same. Weights
    count up to WEIGHT_RATIO_MAX times the median one whatever f is, since there is no bound to keep. Scores: 0.
    """

    word: ClassVar[str] = "mean"

    def least(self, f: int) -> int:
        return f + 1

    def coefficient(self, n: int, f: int) -> float | None:
        return 0.0 if f == 0 else None

    def weight_ratio(self, n: int, f: int) -> float:
        return UNBOUNDED

    def weighted_coefficient(self, n: int, f: int) -> float | None:
        return self.coefficient(n, f)  # the weighted mean is the weighted mean

    def run(self, gathered: Gathered) -> Outcome:
        return Outcome(gathered.combine(gathered.shares()), [True] * gathered.n, [0.0] * gathered.n)


@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point with the smallest sum of distances, weighted if there are weights, by the smoothed Weiszfeld
    algorithm.

    Needs n > 2f. κ = 4 (1 + f / (n - 2f))², for the point itself, as in Allouah et al. 2023: its sum of distances is
    no larger than that of S's mean m, and by the triangle inequality (n - 2f) |value - m| is at most twice the sum of
    |x - m| over S. The search ends when it moves by less than `tolerance` of the median distance, or after `rounds`.
    Distances below `smoothing` times the median distance count as that. Scores: distances to the value. Trusted:
    within three times the median distance. Pillutla et al. 2022, "Robust Aggregation for Federated Learning", IEEE
    TSP.
    """

    rounds: int = 200
    tolerance: float = 1e-9
    smoothing: float = 1e-6
    word: ClassVar[str] = "geometric-median"

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0.0 < self.smoothing < 1.0 or not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"{self!r} has no sense", hint="rounds >= 1, smoothing and tolerance between 0 and 1")

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float:
        return 4.0 * (1.0 + f / (n - 2 * f)) ** 2

    def run(self, gathered: Gathered) -> Outcome:
        gram, shares = gathered.gram(), gathered.shares()
        factors = np.eye(gathered.n)[
            int(np.argmin(np.diagonal(gram)))
        ]  # the update nearest to the coordinates' medians
        for _ in range(self.rounds):
            distances = np.sqrt(squared_distances_to(gram, factors))
            scale = _middle(distances)
            floor = max(self.smoothing * scale, math.ulp(0.0) * 2.0**60)
            pulls = shares / np.maximum(distances, floor)
            moved = pulls / total(pulls)
            step = moved - factors
            factors = moved
            if total(step * product(gram, step)) <= (self.tolerance * scale) ** 2:
                break
        distances = np.sqrt(squared_distances_to(gram, factors))
        limit = 3.0 * _middle(distances)
        return Outcome(gathered.combine(factors), [bool(one <= limit) for one in distances], list(distances))


@dataclass(frozen=True)
class CenteredClipping(Rule):
    """From a point to start with, `rounds` times: move by the mean of the updates' differences to it, each clipped to
    `radius`.

    Needs n > 2f. f updates, whatever they are, move the value by at most 2p · radius in each round, since a round does
    not bring points farther apart; p is their share of all weight, f / n or, with weights, a third if that is more.
    With the radius that fits the noise, which nobody knows, Karimireddy et al. prove an error of the order of f / n
    times the variance for f <= n / 10. Without a radius it is the median distance, anew in each round. `start`:
    "median" (of the coordinates), "zero", or a value such as the last round's, which is what the paper starts from.
    Scores: distances to the last point but one, in radii. Trusted: not clipped there by more than a factor of three.
    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", ICML.
    """

    radius: float | None = None
    rounds: int = 3
    start: Any = field(default="median", repr=False, compare=False)
    word: ClassVar[str] = "centered-clipping"

    def __post_init__(self) -> None:
        if self.radius is not None and not 0.0 < self.radius < math.inf:
            raise ConfigError(
                f"radius={self.radius!r} is not above zero and finite", hint="leave it away for the median"
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds={self.rounds!r} never moves", hint="one round at least")
        if isinstance(self.start, str) and self.start not in ("median", "zero"):
            raise ConfigError(
                f"start={self.start!r} is neither median nor zero", hint="or give a value like one update"
            )

    def least(self, f: int) -> int:
        return 2 * f + 1

    def run(self, gathered: Gathered) -> Outcome:
        beside = self._beside(gathered)
        gram = gathered.gram(origin=beside is None, beside=beside)
        shares = np.append(gathered.shares(), 0.0)
        factors = np.eye(gathered.n + 1)[-1]
        radius, distances = 1.0, np.zeros(gathered.n)
        for _ in range(self.rounds):
            distances = np.sqrt(squared_distances_to(gram, factors))[:-1]
            radius = self.radius if self.radius is not None else _middle(distances)
            clipped = np.append(np.minimum(1.0, radius / np.where(distances > 0.0, distances, 1.0)), 0.0)
            moves = shares * np.where(np.append(distances, 0.0) > 0.0, clipped, 1.0)
            factors = factors * (1.0 - total(moves)) + moves
        result = gathered.combine(factors[:-1], beside=beside, beside_factor=float(factors[-1]))
        scores = distances / radius if radius > 0.0 else np.where(distances > 0.0, np.inf, 0.0)
        return Outcome(result, [bool(score <= 3.0) for score in scores], list(scores))

    def _beside(self, gathered: Gathered) -> Result | None:
        if isinstance(self.start, str):
            if self.start == "zero":
                return None
            return gathered.order(Order(Kind.MEDIAN, gathered.n, gathered.f))[1]
        return as_result(gathered.source, self.start)


@dataclass(frozen=True)
class CovarianceFilter(Rule):
    """CAF: again and again, those who stand out in the direction in which the updates differ most lose weight, until
    no more than n - 2f of it is left (with weights: all weight without twice that of the f heaviest); the value is the
    weighted mean whose largest variance in any direction was the smallest.

    Needs n > 2f. For n > 4.74 f, |value - mean(S)|² <= κ · the largest eigenvalue of S's covariance, which is less
    than what κ is multiplied with elsewhere, and is not known to the rule: docs/explanation/byzantine.md has κ and
    the proof. Scores: 1 less what was left of an update's weight at the value. Trusted: half of it or more. Allouah
    et al. 2025, "Towards Trustworthy Federated Learning with Untrusted Participants", ICML.
    """

    word: ClassVar[str] = "caf"

    def least(self, f: int) -> int:
        return 2 * f + 1

    def coefficient(self, n: int, f: int) -> float | None:
        return self._coefficient(f / n)

    def weight_ratio(self, n: int, f: int) -> float:
        return ratio(n, f, parts=4)  # the f weigh a fifth at most, for which there is a bound

    def weighted_coefficient(self, n: int, f: int) -> float | None:
        heavy = f * self.weight_ratio(n, f)
        return self._coefficient(heavy / (heavy + n - f))

    @staticmethod
    def _coefficient(share: float) -> float | None:
        """κ where hostile ones have this share of all weight: an update of weight 2 is like two of them."""
        odds = share / (1.0 - 2.0 * share)
        lost = 2.0 * odds * (1.0 + odds)
        if lost >= 1.0:
            return None
        radii = (lost + math.sqrt(lost**2 + (1.0 - lost) * (lost + 2.0 * (1.0 + odds)))) / (1.0 - lost)
        return 2.0 * share / (1.0 - 3.0 * share) * (1.0 + radii) ** 2

    def run(self, gathered: Gathered) -> Outcome:
        gram, n, f = gathered.gram(), gathered.n, gathered.f
        own = np.ones(n) if gathered.weights is None else gathered.weights
        rest = max(float(total(own) - 2.0 * total(np.sort(own)[n - f :])), float(np.min(own)))
        left: Matrix = np.ones(n)
        best, best_left, best_factors = math.inf, left, gathered.shares()
        for _ in range(n + 1):  # each turn takes all weight from one
            factors = left * own / total(left * own)
            largest, stands_out = _spread(gram, factors)
            if largest < best:
                best, best_left, best_factors = largest, left, factors
            peak = float(np.max(np.where(left > 0.0, stands_out, 0.0)))
            if peak <= 0.0:
                break
            left = left * np.maximum(1.0 - stands_out / peak, 0.0)
            if total(left * own) <= rest:
                break
        scores = 1.0 - best_left
        return Outcome(gathered.combine(best_factors), [bool(score <= 0.5) for score in scores], list(scores))


def _spread(gram: Matrix, factors: Matrix) -> tuple[float, Matrix]:
    """The largest variance in any direction, and each update's squared deviation in that direction."""
    towards = product(gram, factors)
    centred = gram - towards[:, None] - towards[None, :] + total(factors * towards)
    roots = np.sqrt(factors)
    largest, vector = leading_eigenvector(centred * roots[:, None] * roots[None, :])
    if largest <= 0.0:
        return 0.0, np.zeros(len(gram))
    along = product(centred, roots * vector)
    return largest, along * along / largest


def _middle(numbers: Matrix) -> float:
    """The lower median."""
    return float(np.sort(numbers)[(len(numbers) - 1) // 2])
