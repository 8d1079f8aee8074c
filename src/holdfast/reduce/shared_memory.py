"""Reduction between workers of one host: each member adds one slice of all slots, where they lie.

Large gradients take two rounds: after all Ready, each member writes its slice of the mean into its own result area;
after all Done, everyone reads all slices, which are mapped side by side. Small ones take one: everyone adds everything
for itself, and slots alternate between steps, so that nobody overwrites what a slower peer still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from holdfast.core.words import View
from holdfast.net.groups import BrokenGroup
from holdfast.reduce.aggregators import ALONE, Cut, Parties, Work
from holdfast.reduce.arena import Arena, joint_result, result_parts
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Brought, ReductionTerms
from holdfast.reduce.tree import Range

PLANNED_MAX = 64


class SharedMemory:
    """The path through shared memory, in one view."""

    def __init__(
        self,
        view: View,
        me: str,
        arenas: Mapping[str, Arena],
        terms: ReductionTerms,
        *,
        two_rounds: bool,
        parties: Parties = ALONE,
    ) -> None:
        """`parties`: all members, where they must tell each other what they found in their slices."""
        self.two_rounds = two_rounds
        self.bulk = frozenset(view.members) - {me} if parties is not ALONE else frozenset()
        self._parties = parties
        self._trusted: tuple[bool, ...] | None = None
        self._view = view
        self._me = me
        self._arenas = arenas
        self._terms = terms
        self._vectors: dict[tuple[str, int, int], tuple[torch.Tensor, ...]] = {}
        self._planned: dict[tuple[tuple[Range, str, int], ...], Work] = {}  # of steps whose sums lay in these slots
        self._joint: tuple[Layout, torch.Tensor] | None = None

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        writers = [self._arenas[member] for member in (members if self.two_rounds else [self._me])]
        own, stamp = self._arenas[self._me], (self._view.number, step)
        own.claim_result(*stamp)
        result = self._readable(layout, writers, own)
        work = replace(self._work(layout, members, brought, writers), draw=self._terms.draw(step))
        self._trusted = self._terms.aggregator.reduce(work)
        # In one round a peer may be at the next step already, in its other slots.
        check_stamps(self._arenas, members, {stamp} if self.two_rounds else {stamp, (stamp[0], step + 1)})
        return result, lambda: all(arena.result_stamp == stamp for arena in writers)

    def trusted(self) -> tuple[bool, ...] | None:
        return self._trusted

    def _work(
        self, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought], writers: Sequence[Arena]
    ) -> Work:
        """My part. Slots are used again and again, so that the same tensors over them serve most steps."""
        owners = tuple(sorted([(node, member, slot) for member in members for node, slot in brought[member].nodes]))
        known = self._planned.get(owners)
        if known is not None and known.layout is layout:
            return known
        operands = [self._slot_vectors(member, slot, layout) for _, member, slot in owners]
        own = self._arenas[self._me]
        part, cuts = self._part(layout, writers), []
        for index, (section, out) in enumerate(zip(layout.sections, layout.vectors(own.result(layout)), strict=True)):
            start, stop = section.columns(part)
            cuts.append(Cut([vectors[index][start:stop] for vectors in operands], out[start:stop], start))
        work = Work(layout, cuts, tuple(node for node, _, _ in owners), self._terms.shards, self._parties)
        if len(self._planned) >= PLANNED_MAX:
            self._planned.clear()
        self._planned[owners] = work
        return work

    def _part(self, layout: Layout, writers: Sequence[Arena]) -> tuple[int, int]:
        """The bytes of the result that are mine to write."""
        unit = self._terms.aggregator.unit_bytes(layout)
        return result_parts(layout, len(writers), unit)[writers.index(self._arenas[self._me])]

    def _readable(self, layout: Layout, writers: Sequence[Arena], own: Arena) -> torch.Tensor:
        if self._joint is None or self._joint[0] is not layout:
            own.free_result(self._part(layout, writers))
            unit = self._terms.aggregator.unit_bytes(layout)
            joint = joint_result(writers, layout, unit) if len(writers) > 1 else own.result(layout)
            self._joint = (layout, joint)
        return self._joint[1]

    def _slot_vectors(self, member: str, slot: int, layout: Layout) -> tuple[torch.Tensor, ...]:
        key = (member, slot, id(layout))
        vectors = self._vectors.get(key)
        if vectors is None:
            vectors = self._vectors[key] = layout.vectors(self._arenas[member].slot(slot, layout))
        return vectors


def check_stamps(arenas: Mapping[str, Arena], members: Sequence[str], right: set[tuple[int, int]]) -> None:
    """Fence: a member that went on without us has changed its stamp before it touched what we read."""
    for member in members:
        if arenas[member].stamp not in right:
            raise BrokenGroup(member, "it has moved on")
