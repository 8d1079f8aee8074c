"""Reduction over connections: the owner of each slice gathers it from all members, adds in tree order, hands it out.

Each member sends (n-1)/n of its sums and as much of the mean, which is what a ring or halving-doubling moves, in two
rounds of messages rather than 2·log2(n). Small gradients go whole to everyone, in one round. See
docs/decisions/0003-own-connections.md for why this does not use torch's process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from holdfast.reduce.arena import Arena
from holdfast.reduce.arithmetic import mean_into
from holdfast.reduce.groups import Group
from holdfast.reduce.layout import Layout, slice_bounds
from holdfast.reduce.reduction import Brought
from holdfast.reduce.tree import Range


class Network:
    """The path over the group's connections, in one view."""

    two_rounds = False  # a member that has the mean has heard from everyone: that is the barrier
    bulk = True

    def __init__(self, group: Group, shards: int, arena: Arena, *, small: bool, interrupted: Callable[[], str]) -> None:
        self._group = group
        self._shards = shards
        self._arena = arena
        self._small = small
        self._interrupted = interrupted
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        result = self._arena.result(layout)
        slices = _byte_slices(layout, 1 if self._small else len(members))
        me = members.index(self._group.me)
        peers = [member for member in members if member != self._group.me]
        mine = slices[0 if self._small else me]
        scratch = self._receive_sums(step, layout, members, brought, slices, mine)
        self._add(layout, brought, scratch, result, 0 if self._small else me, len(slices))
        if not self._small and peers:
            own = _views(result, mine)
            theirs = {peer: _views(result, slices[members.index(peer)]) for peer in peers}
            self._exchange(members, dict.fromkeys(peers, own), theirs)
        return result, lambda: True

    def _exchange(
        self,
        members: Sequence[str],
        sends: Mapping[str, Sequence[memoryview]],
        receives: Mapping[str, Sequence[memoryview]],
    ) -> None:
        """Small data all at once; large data round by round, to the r-th member after me, from the r-th before.

        One stream out and one in keeps busy cores from switching between many half-full buffers.
        """
        if self._small:
            self._group.exchange(list(sends.items()), list(receives.items()), interrupted=self._interrupted)
            return
        me, count = members.index(self._group.me), len(members)
        for distance in range(1, count):
            to, source = members[(me + distance) % count], members[(me - distance) % count]
            self._group.exchange([(to, sends[to])], [(source, receives[source])], interrupted=self._interrupted)

    def _receive_sums(
        self,
        step: int,
        layout: Layout,
        members: Sequence[str],
        brought: Mapping[str, Brought],
        slices: Sequence[Sequence[tuple[int, int]]],
        mine: Sequence[tuple[int, int]],
    ) -> dict[tuple[str, Range], torch.Tensor]:
        """Send each peer its slice of my nodes; get my slice of theirs. Slots of peers, as far as I need them."""
        me = self._group.me
        foreign = [(member, node) for member in members if member != me for node, _ in brought[member].nodes]
        need = len(foreign) * layout.slot_bytes if self._small else len(foreign) * _compact_bytes(mine)
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8)
        places: dict[tuple[str, Range], torch.Tensor] = {}
        receives: dict[str, list[memoryview]] = {member: [] for member in members if member != me}
        offset = 0
        for member, node in foreign:
            size = layout.slot_bytes if self._small else _compact_bytes(mine)
            place = places[member, node] = self._scratch[offset : offset + size]
            offset += size
            receives[member] += _views(place, mine if self._small else _compact(mine))
        own = [self._arena.slot(slot, layout) for _, slot in brought[me].nodes]
        sends = {
            member: [view for slot in own for view in _views(slot, slices[0 if self._small else rank])]
            for rank, member in enumerate(members)
            if member != me
        }
        self._exchange(members, sends, receives)
        return places

    def _add(
        self,
        layout: Layout,
        brought: Mapping[str, Brought],
        places: Mapping[tuple[str, Range], torch.Tensor],
        result: torch.Tensor,
        part: int,
        parts: int,
    ) -> None:
        owners = sorted((node, member, slot) for member, one in brought.items() for node, slot in one.nodes)
        nodes = tuple(node for node, _, _ in owners)
        compact = 0
        for section, out in zip(layout.sections, layout.vectors(result), strict=True):
            start, stop = slice_bounds(section.elements, parts, section.dtype.itemsize)[part]
            low, high = section.offset_bytes + start * section.dtype.itemsize, (stop - start) * section.dtype.itemsize
            operands = []
            for node, member, slot in owners:
                if member == self._group.me:
                    piece = self._arena.slot(slot, layout)[low : low + high]
                elif self._small:
                    piece = places[member, node][low : low + high]
                else:
                    piece = places[member, node][compact : compact + high]
                operands.append(piece.view(section.dtype))
            compact += _padded(high)
            mean_into(out[start:stop], operands, nodes, self._shards, 0, stop - start)


def _byte_slices(layout: Layout, parts: int) -> list[list[tuple[int, int]]]:
    """For each part, the byte ranges of a slot that belong to it: one in each section."""
    result: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for section in layout.sections:
        size = section.dtype.itemsize
        for part, (start, stop) in enumerate(slice_bounds(section.elements, parts, size)):
            result[part].append((section.offset_bytes + start * size, section.offset_bytes + stop * size))
    return result


def _padded(count: int) -> int:
    return (count + 63) // 64 * 64


def _compact_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(_padded(stop - start) for start, stop in ranges)


def _compact(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges, moved together."""
    result = []
    offset = 0
    for start, stop in ranges:
        result.append((offset, offset + stop - start))
        offset += _padded(stop - start)
    return result


def _views(memory: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
    whole: memoryview = memory.numpy().data
    return [whole[start:stop] for start, stop in ranges]
