"""Reduction in a view that nobody else is ever in: the mean takes the place of the sum, so it needs no memory.

Elsewhere the sums stay whole, since a reduction may fail and be done again, and the mean of the last step is kept for
those who come late. Here it cannot fail, and nobody comes. So the mean is whole only until the next step's sums begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.core.words import View
from holdfast.reduce.aggregators import Cut, Work
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Brought, ReductionTerms


class Alone:
    """reduction.Path of such a view."""

    two_rounds = False
    bulk: frozenset[str] = frozenset()

    def __init__(self, view: View, me: str, arena: Arena, terms: ReductionTerms) -> None:
        assert view.members == (me,), f"{view.members} are in a view that is {me}'s alone"
        assert not terms.aggregator.shares, "what is told to others may need the operands after a result is written"
        self._view = view
        self._me = me
        self._arena = arena
        self._terms = terms
        self._trusted: tuple[bool, ...] | None = None

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        arena, stamp = self._arena, (self._view.number, step)
        assert arena.result_stamp != stamp, f"the sums of step {step} are a mean already"
        arena.claim_result(*stamp)
        nodes, slots = zip(*brought[self._me].nodes, strict=True)
        vectors = [layout.vectors(arena.slot(slot, layout)) for slot in slots]
        cuts = [Cut(operands, operands[0], 0) for operands in zip(*vectors, strict=True)]
        work = Work(layout, cuts, nodes, self._terms.shards, draw=self._terms.draw(step))
        self._trusted = self._terms.aggregator.reduce(work)
        return arena.slot(slots[0], layout), lambda: arena.stamp == stamp

    def trusted(self) -> tuple[bool, ...] | None:
        return self._trusted
