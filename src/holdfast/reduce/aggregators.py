"""What becomes of the gradients of all shards of a step: a port, and the mean.

Whoever aggregates is given a cut of the operands: some columns of every section, in the order of shards. Members that
share a reduction have different cuts of the same operands. What comes of it must be the same bits for any cut. A rule
that looks at whole rows (distances, say) therefore tells the other members what it found in its own columns, and all
decide from the same numbers: `Parties.share`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.reduce.arithmetic import CHUNK_ELEMENTS, mean_into
from holdfast.reduce.layout import PAGE_BYTES, Layout
from holdfast.reduce.tree import Range


class Parties(Protocol):
    """Those who share one reduction, in rank order."""

    @property
    def count(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def share(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        """What each of them has said; all know how much that is. BrokenGroup if one is gone."""


class Alone:
    """One that does all of it."""

    count = 1
    rank = 0

    def share(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        return [mine]


ALONE = Alone()


@dataclass(frozen=True)
class Cut:
    """Some columns of one section: operands and result have those alone. `start`: where they begin in the section."""

    operands: Sequence[torch.Tensor]
    out: torch.Tensor
    start: int


@dataclass(frozen=True)
class Work:
    """One party's part of a reduction: a cut of each section, of `layout`, in this order."""

    layout: Layout
    cuts: Sequence[Cut]
    nodes: tuple[Range, ...]  # of the operands
    shards: int
    parties: Parties = ALONE
    draw: int = 0  # what an aggregator draws by chance follows from this: another one in each step, all parties' alike


class Aggregator(Protocol):
    """`by_shard`: every shard's tensors travel by themselves. If not, they are added up in tree order on their way."""

    @property
    def by_shard(self) -> bool: ...

    @property
    def shares(self) -> bool:
        """Whether parties tell each other what they found. Then no result may lie where an operand is."""

    @property
    def least(self) -> int:
        """A step to which fewer shards come changes nothing, and its samples are passed over."""

    def unit_bytes(self, layout: Layout) -> int:
        """Members cut a slot at multiples of this, which is one of PAGE_BYTES."""

    def reduce(self, work: Work) -> tuple[bool, ...] | None:
        """Writes every cut's result. Which of the operands were trusted, if that is a question."""

    def metric(self, values: Sequence[float]) -> float:
        """What the shards recorded under one name, in the order of shards, comes to."""


class ByColumn(ABC):
    """An aggregator that treats every number by itself, whatever the others are."""

    by_shard: bool = False
    shares = False
    least = 1

    def unit_bytes(self, layout: Layout) -> int:
        return PAGE_BYTES

    def reduce(self, work: Work) -> tuple[bool, ...] | None:
        for cut in work.cuts:
            self.combine_into(cut.out, cut.operands, work.nodes, work.shards)
        return None

    def metric(self, values: Sequence[float]) -> float:
        return sum(values) / len(values)

    @abstractmethod
    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int
    ) -> None:
        """out from the operands, which are those of `nodes`. `out` may be one of the operands."""


class Mean(ByColumn):
    """The sum in tree order, divided by the number of shards in it. `leaves`: so many of the run's are added up in each
    of these already, where a group of ranks computes them side by side."""

    def __init__(self, leaves: int = 1) -> None:
        self._leaves = leaves

    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int
    ) -> None:
        mean_into(out, operands, nodes, shards, 0, out.numel(), leaves=self._leaves)


MEAN = Mean()


class ByShard(ByColumn):
    """A combination that must see every shard's numbers, such as a median. They are not added up before."""

    by_shard = True

    @abstractmethod
    def combine(self, shards: torch.Tensor) -> torch.Tensor:
        """One number for each column of (shards, numbers), from that column alone."""

    def combine_into(
        self, out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: tuple[Range, ...], shards: int
    ) -> None:
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            mean_into(out, operands, nodes, shards, 0, out.numel())  # parts of whole numbers: see modes/buffers.py
            return
        for low in range(0, out.numel(), CHUNK_ELEMENTS):
            high = min(low + CHUNK_ELEMENTS, out.numel())
            out[low:high] = self.combine(torch.stack([operand[low:high] for operand in operands]))
