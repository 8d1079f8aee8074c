"""A worker's own sums for one step: each shard's gradients go into the tree as far as it reaches here.

Owns the slots of this worker, wherever they are (slots.py). What is in a slot is the sum of one node of the tree;
merging two siblings adds one slot into the other. Nothing here is changed by a reduction, so a reduction that fails can
be done again.

Buffers travel like gradients: every shard starts from the step's first values, and the step ends with the mean
of what the shards made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from holdfast.core.errors import ConfigError
from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from holdfast.reduce.slots import ArenaSlots, Deferred, Slots
from holdfast.reduce.tree import Range, Tree, leaves_over, tree_over


class Sums:
    """The sums of one step. `begin` starts a step; `add` takes a shard; `nodes` says what is there."""

    def __init__(
        self, arena: Arena, shards: int, *, parities: int, by_shard: bool = False, slots: Slots | None = None
    ) -> None:
        """`by_shard`: nothing is added up, every shard keeps a slot of its own. `slots`: None: those of the arena."""
        self.arena = arena
        self.slots: Slots = slots or ArenaSlots(arena)
        self.shards = shards
        self.tree: Tree = leaves_over(shards) if by_shard else tree_over(shards)
        self._parities = parities  # 2: a peer may still read the sums of the step before
        self._per_parity = arena.slots // parities
        self._views: dict[int, list[torch.Tensor]] = {}  # by slot
        self.layout: Layout | None = None
        self.step = -1
        self.held: dict[Range, int] = {}  # node -> slot
        self.present: set[int] = set()  # tensors that some shard has brought
        self.deferred: list[Deferred] = []  # the same, of shards of which it is not known yet
        self._free: list[int] = []

    def begin(self, step: int, layout: Layout) -> None:
        """Start a step, unless it is the one under way: then its sums are kept."""
        if layout is not self.layout:
            self._views.clear()
            self.slots.forget()
            self.layout = layout
        if step == self.step:
            return
        self.step = step
        first = (step % self._parities) * self._per_parity
        self._free = list(range(first + self._per_parity - 1, first - 1, -1))
        self.held = {}
        self.present = set()
        self.deferred = []

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        """Put one shard's tensors where the tree wants them. None is a gradient that is not there: zeros.

        `present` are the tensors that this shard has a say in: gradients that are there, buffers that it changed.
        """
        node: Range = (shard, shard + 1)
        absent = [index for index, tensor in enumerate(tensors) if tensor is None]
        if isinstance(present, Deferred):
            self.deferred.append(present)
        else:
            self.present.update(present)
        parent_of = self.tree.parents
        parent = parent_of.get(node)
        if parent is not None and parent[1] in self.held:
            slot = self.held.pop(parent[1])
            self._accumulate(slot, tensors, absent)
            node = parent[0]
        else:
            slot = self._take_slot()
            self._store(slot, tensors, absent)
        while (parent := parent_of.get(node)) is not None and parent[1] in self.held:
            other = self.held.pop(parent[1])
            self._merge(slot, other)
            self._free.append(other)
            node = parent[0]
        self.held[node] = slot

    def nodes(self) -> list[tuple[Range, int]]:
        return sorted(self.held.items())

    def _take_slot(self) -> int:
        assert self._free, "more nodes than slots"
        return self._free.pop()

    def _slot_views(self, slot: int) -> list[torch.Tensor]:
        assert self.layout is not None
        views = self._views.get(slot)
        if views is None:
            views = self._views[slot] = self.layout.views(self.slots.memory(slot, self.layout))
        return views

    def _store(self, slot: int, tensors: Sequence[torch.Tensor | None], absent: list[int]) -> None:
        views = self._slot_views(slot)
        if views and not absent:  # a model that is frozen throughout brings nothing
            torch._foreach_copy_(views, _dense(tensors))
            return
        for view, tensor in zip(views, tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)

    def _accumulate(self, slot: int, tensors: Sequence[torch.Tensor | None], absent: list[int]) -> None:
        views = self._slot_views(slot)
        if views and not absent:
            torch._foreach_add_(views, _dense(tensors))
            return
        for view, tensor in zip(views, tensors, strict=True):
            # Adding zero is not nothing: it turns -0.0 into 0.0, as it would on a worker that stored the zeros.
            view.add_(0 if tensor is None else tensor)

    def _merge(self, slot: int, other: int) -> None:
        assert self.layout is not None
        into = self.layout.vectors(self.slots.memory(slot, self.layout))
        with_ = self.layout.vectors(self.slots.memory(other, self.layout))
        for a, b in zip(into, with_, strict=True):
            a.add_(b)


def _dense(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    found = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.is_sparse for tensor in found):
        raise ConfigError(
            "a gradient is sparse, and sparse gradients cannot be summed in a fixed order",
            hint="build the embedding with sparse=False",
        )
    return found
