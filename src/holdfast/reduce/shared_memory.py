"""Reduction between workers of one host: each member adds one slice of all slots, where they lie.

Large gradients take two rounds: after all Ready, each member writes its slice of the mean into the result area of
the view's first member; after all Done, everyone reads it. Small ones take one: everyone adds everything for itself,
and slots alternate between steps, so that nobody overwrites what a slower peer still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.core.words import View
from holdfast.reduce.arena import Arena
from holdfast.reduce.arithmetic import mean_into
from holdfast.reduce.groups import BrokenGroup
from holdfast.reduce.layout import Layout, slice_bounds
from holdfast.reduce.reduction import Brought


class SharedMemory:
    """The path through shared memory, in one view."""

    bulk = False

    def __init__(self, view: View, me: str, shards: int, arenas: Mapping[str, Arena], *, two_rounds: bool) -> None:
        self.two_rounds = two_rounds
        self._view = view
        self._me = me
        self._shards = shards
        self._arenas = arenas
        self._vectors: dict[tuple[str, int, int], tuple[torch.Tensor, ...]] = {}

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        owners = [(node, member, slot) for member in members for node, slot in brought[member].nodes]
        owners.sort()
        nodes = tuple(node for node, _, _ in owners)
        operands = [self._slot_vectors(member, slot, layout) for _, member, slot in owners]
        home = self._arenas[members[0] if self.two_rounds else self._me]
        result = home.result(layout)
        rank, parts = (members.index(self._me), len(members)) if self.two_rounds else (0, 1)
        for index, (section, out) in enumerate(zip(layout.sections, layout.vectors(result), strict=True)):
            start, stop = slice_bounds(section.elements, parts, section.dtype.itemsize)[rank]
            mean_into(out, [vectors[index] for vectors in operands], nodes, self._shards, start, stop)
        self._check_stamps(step, members)
        if not self.two_rounds:
            return result, _always
        # Its owner may be at the next step already: the result is not touched before we are ready for that too.
        intact = ((self._view.number, step), (self._view.number, step + 1))
        return result, lambda: home.stamp in intact

    def _slot_vectors(self, member: str, slot: int, layout: Layout) -> tuple[torch.Tensor, ...]:
        key = (member, slot, id(layout))
        vectors = self._vectors.get(key)
        if vectors is None:
            vectors = self._vectors[key] = layout.vectors(self._arenas[member].slot(slot, layout))
        return vectors

    def _check_stamps(self, step: int, members: Sequence[str]) -> None:
        """Fence: a member that went on without us has changed its stamp before it touched what we read."""
        for member in members:
            view, at = self._arenas[member].stamp
            next_step = not self.two_rounds and at == step + 1
            if (view, at) != (self._view.number, step) and not next_step:
                raise BrokenGroup(member, "it has moved on")


def _always() -> bool:
    return True
