"""Clipping and Gaussian noise, added by every client before its numbers are masked: no server sees a sum without noise.

A client scales its update down to the length `clip`. The sum of a bucket must carry noise of `noise` times `clip`, also
if only the threshold's number of members survive and the colluding ones add none: so each adds a share of it,
`noise * clip / sqrt(threshold - colluding)`. Where all survive, the sum carries more than it must.

What the noise is: two uniform numbers of 53 bits from the kernel's generator make two normal ones (Box and Muller), in
float64, which are then rounded to the units of the encoding together with the update. What it is not: the discrete
Gaussian, for which the accountant's numbers would be exact to the last digit. Its tail ends at 8.6 standard deviations,
which a normal number exceeds once in 10 ** 17 draws; and how long a draw takes is not hidden from who watches the
processor.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError

TAIL = 8.6  # standard deviations; sqrt(2 * 53 * log(2)) is 8.57


@dataclass(frozen=True, kw_only=True)
class Noise:
    """`multiplier`: standard deviations of a bucket's noise in units of `clip`, the longest that an update can be."""

    multiplier: float
    clip: float

    def validate(self) -> Noise:
        if not 0.0 < self.clip < math.inf:
            raise ConfigError(f"--clip {self.clip:g} is no length", hint="the longest update that counts: above zero")
        if not 0.0 <= self.multiplier < 1e6:
            raise ConfigError(f"--noise {self.multiplier:g} is no noise", hint="1 is usual; 0 only clips")
        return self

    def share(self, terms: Terms, members: int) -> float:
        """The standard deviation of what one of so many members adds."""
        return self.multiplier * self.clip / math.sqrt(terms.threshold(members) - terms.colluding)

    def limit(self, share: float) -> float:
        """What no number of an honest client's noisy update exceeds."""
        return self.clip + TAIL * share

    def added(self, update: NDArray[Any], share: float) -> NDArray[np.float64]:
        return clipped(update, self.clip) + normal(update.size, share).reshape(update.shape)


def clipped(update: NDArray[Any], norm: float) -> NDArray[np.float64]:
    """Scaled down to this length if it is longer. Never longer by rounding than the length says."""
    numbers = np.asarray(update, dtype=np.float64)
    length = float(np.sqrt(np.square(numbers).sum()))
    return numbers if length <= norm else numbers * (norm / length * (1.0 - 1e-12))


def normal(count: int, deviation: float) -> NDArray[np.float64]:
    """So many normal numbers, from the kernel's generator."""
    if deviation == 0.0 or count == 0:
        return np.zeros(count)
    half = -(-count // 2)
    drawn = np.frombuffer(os.urandom(16 * half), dtype="<u8") >> np.uint64(11)
    uniform = (drawn.astype(np.float64) + 1.0) * 2.0**-53  # above 0, up to 1
    length = np.sqrt(-2.0 * np.log(uniform[:half]))
    angle = 2.0 * math.pi * uniform[half:]
    both = np.concatenate([length * np.cos(angle), length * np.sin(angle)])
    return deviation * both[:count]
