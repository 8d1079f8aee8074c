"""Numbers as whole numbers modulo a power of two: sums are exact, and a mask that is uniform hides a number entirely.

A number is rounded to a multiple of 2 ** -fraction_bits, to even where it is half way, and counted in these units. It
is kept within plus and minus `limit_units`; as long as `members` such numbers stay below half of the modulus, their sum
is what it is without any modulus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import ConfigError

Residues = NDArray[Any]  # of uint32 or uint64: whole numbers modulo 2 ** bits
DTYPES: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
FRACTION_BITS_MAX = 40


@dataclass(frozen=True)
class Encoding:
    bits: int
    fraction_bits: int
    limit_units: int

    @classmethod
    def fitting(cls, limit: float, members: int, bits: int = 32) -> Encoding:
        """The finest units in which `members` numbers from -limit to limit have an exact sum."""
        if bits not in DTYPES:
            raise ConfigError(f"there are no numbers of {bits} bits", hint="32, or 64 for a larger range")
        if not 0.0 < limit < math.inf or members < 1:
            raise ConfigError(
                f"{members} numbers up to {limit:g} are no range", hint="a limit above zero, one member or more"
            )
        largest = (1 << (bits - 1)) - 1
        fraction_bits = min(math.floor(math.log2(largest / members / limit)), FRACTION_BITS_MAX)
        if fraction_bits < 0:
            raise ConfigError(
                f"{members} numbers up to {limit:g} do not fit into {bits} bits", hint="clip updates, or take 64 bits"
            )
        return cls(bits, fraction_bits, math.floor(limit * (1 << fraction_bits)))

    @property
    def limit(self) -> float:
        return self.limit_units / (1 << self.fraction_bits)

    @property
    def number_bytes(self) -> int:
        return self.bits // 8

    def is_sound(self, members: int) -> bool:
        """Whether the sum of so many numbers cannot leave the range."""
        return (
            self.bits in DTYPES
            and 0 <= self.fraction_bits <= FRACTION_BITS_MAX
            and 0 < self.limit_units * members < 1 << (self.bits - 1)
        )

    def encode(self, values: NDArray[Any]) -> Residues:
        """What is beyond the limit is clipped to it. ConfigError for what is not finite."""
        numbers = np.asarray(values, dtype=np.float64).reshape(-1)
        if not np.isfinite(numbers).all():
            raise ConfigError("an update that is not finite cannot be masked", hint="leave the round out")
        units = np.rint(np.ldexp(np.clip(numbers, -self.limit, self.limit), self.fraction_bits))
        return units.astype(np.int64).astype(DTYPES[self.bits])

    def decode(self, residues: Residues) -> NDArray[np.float64]:
        """Of a sum as of one number: what is above half of the modulus is below zero."""
        signed = residues.astype(DTYPES[self.bits]).view(f"<i{self.number_bytes}")
        return np.ldexp(signed.astype(np.float64), -self.fraction_bits)

    def to_bytes(self, residues: Residues) -> bytes:
        return residues.astype(DTYPES[self.bits], copy=False).tobytes()

    def from_bytes(self, content: bytes) -> Residues:
        return np.frombuffer(content, dtype=DTYPES[self.bits])
