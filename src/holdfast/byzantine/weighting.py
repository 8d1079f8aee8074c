"""Sample weights, which clients claim for themselves: honoured, and bounded, so that nobody buys a rule with a
number.

A weight counts in units of the median weight. Where nobody is hostile (f = 0) it counts from WEIGHT_RATIO_MIN to
WEIGHT_RATIO_MAX of them. Where f of n may be, no two weights differ by more than `ratio`, which is a function of n and
f and of nothing that anybody claims: (n - f) / 2f, from 1 to WEIGHT_RATIO_MAX. A weight counts then from 1 / √ratio to
√ratio. So the f together weigh half as much as the others at most, however heavy they claim to be and however light
the honest ones are; and where f are more than a third of n, all weigh the same. Rules whose bound asks for more have a
smaller ratio (`Rule.weight_ratio`).

With so bounded weights a rule that has a coefficient κ for equal ones has κ' = ratio⁴ (κ + 1), for the weighted mean
and variance of S in the place of the plain ones, and κ itself where the ratio is 1: docs/explanation/byzantine.md.

A weight that is negative or not finite is an attack, like a NaN in the update. An update of weight zero has nothing to
say and is left out, and is not counted as an attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.byzantine.kernels.port import Matrix
from holdfast.core.errors import ConfigError

WEIGHT_RATIO_MAX = 4.0
WEIGHT_RATIO_MIN = 2.0**-20  # so that no sum of weights is zero
UNBOUNDED = WEIGHT_RATIO_MAX / WEIGHT_RATIO_MIN  # the ratio where nobody is hostile


def ratio(n: int, f: int, parts: int = 2) -> float:
    """How many times as heavy as another an update may be, so that the others weigh `parts` times as much as f of n."""
    return UNBOUNDED if f == 0 else min(max((n - f) / (parts * f), 1.0), WEIGHT_RATIO_MAX)


@dataclass(frozen=True)
class Weights:
    """For each update its claim in units of the median one, and which ones are left out for theirs."""

    claims: tuple[float, ...]
    hostile: frozenset[int]
    empty: frozenset[int]

    def within(self, ratio: float, live: Sequence[int]) -> Matrix:
        """What these updates count for, none more than `ratio` times as much as another."""
        most = min(math.sqrt(ratio), WEIGHT_RATIO_MAX)
        least = most / ratio
        return np.array([min(max(self.claims[number], least), most) for number in live])


def bounded(given: Sequence[float], n: int) -> Weights:
    """ConfigError if there are not n of them, or if no update has one above zero."""
    claimed = [float(one) for one in given]
    if len(claimed) != n:
        raise ConfigError(f"there are {len(claimed)} weights for {n} updates", hint="give one weight for each update")
    hostile = frozenset(i for i, weight in enumerate(claimed) if not math.isfinite(weight) or weight < 0.0)
    empty = frozenset(i for i, weight in enumerate(claimed) if weight == 0.0)
    useful = sorted(claimed[i] for i in range(n) if i not in hostile and i not in empty)
    if not useful:
        raise ConfigError("no update has a weight above zero", hint="leave weights away if all count alike")
    unit = useful[(len(useful) - 1) // 2]
    claims = tuple(0.0 if i in hostile or i in empty else claimed[i] / unit for i in range(n))
    return Weights(claims, hostile, empty)
