"""Reduction over connections: the owner of each slice gathers it from all parties, adds in tree order, hands it out.

A party is a member, or one member for all of its host (reduce/hosts.py). Each sends (n-1)/n of its sums and as much
of the mean, which is what a ring or halving-doubling moves, in two rounds of messages rather than 2·log2(n). Small
gradients go whole to everyone, in one round. See docs/decisions/0003-own-connections.md for why this does not use
torch's process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from holdfast.net.groups import Group
from holdfast.reduce.arena import Arena
from holdfast.reduce.arithmetic import sum_into
from holdfast.reduce.layout import Layout, slice_bounds
from holdfast.reduce.reduction import Brought, ReductionTerms
from holdfast.reduce.tree import Range

BLOCK_BYTES = 4 * 1024 * 1024  # sums are sent in blocks: while one is on its way, the next is added up

Vectors = list[torch.Tensor]  # one slice of a slot: a vector for each section


class Network:
    """The path over the group's connections, in one view: every member is a party."""

    two_rounds = False  # a member that has the mean has heard from everyone: that is the barrier

    def __init__(self, group: Group, arena: Arena, terms: ReductionTerms) -> None:
        self.bulk = frozenset(group.view.members) - {group.me}
        self._group = group
        self._arena = arena
        self._exchange = SliceExchange(group, group.view.members, terms)

    def reduce(
        self, step: int, layout: Layout, members: Sequence[str], brought: Mapping[str, Brought]
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        arena, stamp = self._arena, (self._group.view.number, step)
        arena.claim_result(*stamp)
        result = arena.result(layout)
        here = [(node, arena.slot(slot, layout)) for node, slot in brought[self._group.me].nodes]
        nodes = {member: tuple(node for node, _ in brought[member].nodes) for member in members}
        self._exchange.reduce(layout, here, nodes, result)
        return result, lambda: arena.result_stamp == stamp


class SliceExchange:
    """Parties of a group that hand each other slices: each brings a few nodes of the tree, all get the mean.

    What a party sends may be sums of several slots that it can read; these are added up block by block while they
    are sent. So it needs memory for its slice of the other parties' nodes, less one, and for one block.
    """

    def __init__(self, group: Group, parties: Sequence[str], terms: ReductionTerms) -> None:
        self._group = group
        self._parties = tuple(parties)
        self._rank = self._parties.index(group.me)
        self._terms = terms
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._block = torch.empty(0, dtype=torch.uint8)

    def reduce(
        self,
        layout: Layout,
        here: Sequence[tuple[Range, torch.Tensor]],
        nodes: Mapping[str, tuple[Range, ...]],
        result: torch.Tensor,
    ) -> None:
        """`here` are the slots that I can read; `nodes` is what each party sends, which for me is the sum of these.

        The mean is in `result` afterwards. Nothing else is changed, so that all this can be done again.
        """
        parts = 1 if self._terms.small else len(self._parties)
        means = _cut(layout, result, parts)
        mine = means[self._rank % parts]
        slots = [(node, _cut(layout, slot, parts)) for node, slot in here]
        places = self._make_places(nodes, mine)
        if self._terms.small:
            self._gather_at_once(slots, nodes, places)
        else:
            self._gather_in_rounds(slots, nodes, places)
        operands = [(node, cut[self._rank % parts]) for node, cut in slots]
        operands += [(node, vectors) for (_, node), vectors in places.items()]
        operands.sort(key=lambda operand: operand[0])
        order = tuple(node for node, _ in operands)
        for index, out in enumerate(mine):
            vectors = [vectors[index] for _, vectors in operands]
            self._terms.aggregator.combine_into(out, vectors, order, self._terms.shards, (0, out.numel()))
        if not self._terms.small:
            self._hand_out(means)

    def _make_places(self, nodes: Mapping[str, tuple[Range, ...]], mine: Vectors) -> dict[tuple[str, Range], Vectors]:
        """Where the others' nodes go, as far as they are of my slice: the first where the mean will be."""
        foreign = [(party, node) for party in self._parties if party != self._group.me for node in nodes[party]]
        sizes = [_padded(vector.numel() * vector.element_size()) for vector in mine]
        need = sum(sizes) * max(0, len(foreign) - 1)
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8)
        places: dict[tuple[str, Range], Vectors] = {}
        offset = 0
        for key in foreign:
            if not places:
                places[key] = mine
                continue
            places[key] = []
            for vector, size in zip(mine, sizes, strict=True):
                used = vector.numel() * vector.element_size()
                places[key].append(self._scratch[offset : offset + used].view(vector.dtype))
                offset += size
        return places

    def _gather_at_once(
        self,
        slots: Sequence[tuple[Range, list[Vectors]]],
        nodes: Mapping[str, tuple[Range, ...]],
        places: Mapping[tuple[str, Range], Vectors],
    ) -> None:
        others = [party for party in self._parties if party != self._group.me]
        sends = list(self._outgoing(slots, nodes[self._group.me], 0))
        receives = [
            (party, [view for node in nodes[party] for view in _blocks(places[party, node])]) for party in others
        ]
        self._group.exchange([(party, sends) for party in others], receives, interrupted=self._terms.interrupted)

    def _gather_in_rounds(
        self,
        slots: Sequence[tuple[Range, list[Vectors]]],
        nodes: Mapping[str, tuple[Range, ...]],
        places: Mapping[tuple[str, Range], Vectors],
    ) -> None:
        """Round by round, block by block. Both ends cut alike: nobody waits for a block that is not under way."""
        for to, source in self._rounds():
            outgoing = self._outgoing(slots, nodes[self._group.me], self._parties.index(to))
            incoming = (view for node in nodes[source] for view in _blocks(places[source, node]))
            for out, into in zip_longest(outgoing, incoming):
                sends = [] if out is None else [(to, [out])]
                receives = [] if into is None else [(source, [into])]
                self._group.exchange(sends, receives, interrupted=self._terms.interrupted)

    def _hand_out(self, means: Sequence[Vectors]) -> None:
        own = [_bytes_of(vector) for vector in means[self._rank]]
        for to, source in self._rounds():
            theirs = [_bytes_of(vector) for vector in means[self._parties.index(source)]]
            self._group.exchange([(to, own)], [(source, theirs)], interrupted=self._terms.interrupted)

    def _rounds(self) -> Iterator[tuple[str, str]]:
        """To the r-th party after me, from the r-th before: one stream out and one in.

        That keeps busy cores from switching between many half-full buffers.
        """
        count = len(self._parties)
        for distance in range(1, count):
            yield self._parties[(self._rank + distance) % count], self._parties[(self._rank - distance) % count]

    def _outgoing(
        self, slots: Sequence[tuple[Range, list[Vectors]]], nodes: Sequence[Range], part: int
    ) -> Iterator[memoryview]:
        """One part of my nodes, in blocks. A block that is a sum is gone when the next one is asked for."""
        for node in nodes:
            inside = [(below, cut[part]) for below, cut in slots if node[0] <= below[0] < node[1]]
            if len(inside) == 1:
                yield from _blocks(inside[0][1])
                continue
            inside.sort(key=lambda operand: operand[0])
            below = [one for one, _ in inside]
            for index, vector in enumerate(inside[0][1]):
                for low, high in _spans(vector):
                    out = self._room(high - low, vector.dtype)
                    sum_into(out, [vectors[index][low:high] for _, vectors in inside], below, node)
                    yield _bytes_of(out)

    def _room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        if self._terms.small:  # all blocks are sent at once
            return torch.empty(elements, dtype=dtype)
        if not self._block.numel():
            self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        return self._block[: elements * dtype.itemsize].view(dtype)


def _cut(layout: Layout, memory: torch.Tensor, parts: int) -> list[Vectors]:
    """A slot in so many parts, each with a run of every section."""
    result: list[Vectors] = [[] for _ in range(parts)]
    for section, vector in zip(layout.sections, layout.vectors(memory), strict=True):
        for part, (start, stop) in enumerate(slice_bounds(section.elements, parts, section.dtype.itemsize)):
            result[part].append(vector[start:stop])
    return result


def _spans(vector: torch.Tensor) -> Iterator[tuple[int, int]]:
    count, block = vector.numel(), BLOCK_BYTES // vector.element_size()
    for low in range(0, count, block):
        yield low, min(low + block, count)


def _blocks(vectors: Vectors) -> Iterator[memoryview]:
    for vector in vectors:
        for low, high in _spans(vector):
            yield _bytes_of(vector[low:high])


def _bytes_of(vector: torch.Tensor) -> memoryview:
    data: memoryview = vector.view(torch.uint8).numpy().data
    return data


def _padded(count: int) -> int:
    return (count + 63) // 64 * 64
