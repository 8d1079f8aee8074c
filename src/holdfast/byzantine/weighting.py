"""Sample weights, which clients claim for themselves: honoured, and bounded, so that nobody buys a rule with a
number.

A weight counts in units of the median weight, at most WEIGHT_RATIO_MAX of them: as long as most clients are honest,
the median is between two honest weights. A weight that is negative or not finite is an attack, like a NaN in the
update. An update of weight zero has nothing to say and is left out, and is not counted as an attack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.errors import ConfigError

WEIGHT_RATIO_MAX = 4.0
WEIGHT_RATIO_MIN = 2.0**-20  # so that no sum of weights is zero


@dataclass(frozen=True)
class Weights:
    """For each update its bounded weight, and which ones are left out for theirs."""

    values: tuple[float, ...]
    hostile: frozenset[int]
    empty: frozenset[int]


def bounded(given: Sequence[float], n: int) -> Weights:
    """ConfigError if there are not n of them, or if more than half are of no use."""
    claimed = [float(one) for one in given]
    if len(claimed) != n:
        raise ConfigError(f"there are {len(claimed)} weights for {n} updates", hint="give one weight for each update")
    hostile = frozenset(i for i, weight in enumerate(claimed) if not math.isfinite(weight) or weight < 0.0)
    empty = frozenset(i for i, weight in enumerate(claimed) if weight == 0.0)
    useful = sorted(claimed[i] for i in range(n) if i not in hostile and i not in empty)
    if not useful:
        raise ConfigError("no update has a weight above zero", hint="leave weights away if all count alike")
    unit = useful[(len(useful) - 1) // 2]
    values = [
        0.0 if i in hostile or i in empty else min(max(claimed[i] / unit, WEIGHT_RATIO_MIN), WEIGHT_RATIO_MAX)
        for i in range(n)
    ]
    return Weights(tuple(values), hostile, empty)
