"""What becomes of the gradients of all shards of a step: a port, and the mean.

Whoever aggregates is given the operands of one run of numbers at a time, in the order of shards, and writes what comes
of them. Each number is treated by itself or with the run's others only if all members cut alike, so an aggregator must
give the same for any cut: bits must not depend on how many members share the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.reduce.arithmetic import CHUNK_ELEMENTS, mean_into
from holdfast.reduce.tree import Range


class Aggregator(Protocol):
    """`by_shard`: every shard's tensors travel by themselves. If not, they are added up in tree order on their way."""

    @property
    def by_shard(self) -> bool: ...

    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int, run: Range
    ) -> None:
        """out[run] from the operands there, which are those of `nodes`. `out` may be one of the operands."""


class Mean:
    """The sum in tree order, divided by the number of shards in it."""

    by_shard = False

    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int, run: Range
    ) -> None:
        mean_into(out, operands, nodes, shards, *run)


MEAN = Mean()


class ByShard(ABC):
    """A combination that must see every shard's numbers, such as a median. They are not added up before."""

    by_shard = True

    @abstractmethod
    def combine(self, shards: torch.Tensor) -> torch.Tensor:
        """One number for each column of (shards, numbers), from that column alone."""

    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int, run: Range
    ) -> None:
        start, stop = run
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            mean_into(out, operands, nodes, shards, start, stop)  # parts of whole numbers: see modes/buffers.py
            return
        for low in range(start, stop, CHUNK_ELEMENTS):
            high = min(low + CHUNK_ELEMENTS, stop)
            out[low:high] = self.combine(torch.stack([operand[low:high] for operand in operands]))
