"""What a kernel is asked: the port, and what two implementations share.

Rows are one-dimensional, contiguous CPU tensors of one dtype, float32 or float64, and of one length. `mix` turns n
rows into as many combinations as it has rows, which are then the updates. A number that is not finite, or beyond
float32's range, is noticed in every pass: `bad` names its row, and whatever else that pass gave is of no use.

Both implementations give the same bits on any machine and with any number of threads: the order of operations is
fixed, no multiplication is fused with an addition unless both are exact, and columns may be cut anywhere (`gram`: at
pages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.byzantine.kernels.networks import Comparator, sorting_network

Matrix = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

GROUP = 128  # columns that are treated at once
PAGE = 64 * GROUP  # columns of one partial sum of a Gram matrix
BITS = 23  # of the whole numbers that Gram matrices are made of
GRAM_MIN, GRAM_MAX = 1e-300, 1e300  # a group of centred numbers with a largest one beyond these is seen as zeros
COUNTED_EVERY = 8  # one group in so many is looked at for who is outside
MAGNITUDE_MAX = float(np.finfo(np.float32).max)


class Kind(IntEnum):
    """What is made of a sorted column; columns.c has the same numbers."""

    MEDIAN = 0
    TRIMMED = 1
    NEAREST = 2


@dataclass(frozen=True)
class Order:
    """A statistic of sorted columns of `rows` updates.

    TRIMMED: the mean without the `trim` smallest and largest. NEAREST: the mean of the `kept` that are nearest to the
    median. For all of them an update is outside in a column if it is not among the rows - 2 * trim in the middle.
    """

    kind: Kind
    rows: int
    trim: int
    kept: int = 0

    def network(self, weighted: bool) -> tuple[Comparator, ...]:
        if weighted or self.kind is not Kind.MEDIAN:
            return sorting_network(self.rows)
        middle = {(self.rows - 1) // 2, self.rows // 2, self.trim, self.rows - 1 - self.trim}
        return sorting_network(self.rows, frozenset(middle))


@dataclass(frozen=True)
class Ordered:
    """Which rows are bad; in how many columns each update was outside. `counted`: in how many anybody was."""

    bad: Flags
    outside: Counts
    counted: int


class Kernels(Protocol):
    def order(
        self,
        rows: Sequence[torch.Tensor],
        mix: Matrix | None,
        weights: Matrix | None,
        order: Order,
        offset: int,
        out: torch.Tensor,
    ) -> Ordered:
        """Writes the statistic of each column to `out`. `offset`: the first column's place in the whole update."""

    def gram(self, rows: Sequence[torch.Tensor], mix: Matrix | None, origin: bool) -> tuple[Matrix, Flags]:
        """(pages, m, m): products of the updates centred at each column's lower median; `origin` adds an update of
        zeros.
        """

    def combine(self, rows: Sequence[torch.Tensor], factors: Matrix, out: torch.Tensor) -> Flags:
        """Writes the sum of factor times row to `out`, which may be one of the rows."""
