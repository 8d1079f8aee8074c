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
from holdfast.reduce.aggregators import ALONE, Cut, Work
from holdfast.reduce.arena import Arena, result_parts
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
        self._exchange.reduce(step, layout, here, nodes, result)
        return result, lambda: arena.result_stamp == stamp

    def trusted(self) -> tuple[bool, ...] | None:
        return self._exchange.trusted


class GroupParties:
    """Members of a group that tell each other a few bytes in the middle of a reduction."""

    def __init__(self, group: Group, parties: Sequence[str], interrupted: Callable[[], str]) -> None:
        self._group = group
        self._parties = tuple(parties)
        self._interrupted = interrupted
        self.count = len(self._parties)
        self.rank = self._parties.index(group.me)

    def share(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        assert len(mine) == sizes[self.rank]
        theirs = {party: bytearray(size) for party, size in zip(self._parties, sizes, strict=True)}
        theirs[self._group.me][:] = mine
        others = [party for party in self._parties if party != self._group.me]
        sends = [(party, [memoryview(mine)]) for party in others]
        receives = [(party, [memoryview(theirs[party])]) for party in others]
        self._group.exchange(sends, receives, interrupted=self._interrupted)
        return [bytes(theirs[party]) for party in self._parties]


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
        self._shares = terms.aggregator.shares
        spread = self._shares and not terms.small
        self._tellers = GroupParties(group, self._parties, terms.interrupted) if spread else ALONE
        self.trusted: tuple[bool, ...] | None = None  # which operands, in the last reduction
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._block = torch.empty(0, dtype=torch.uint8)

    def reduce(
        self,
        step: int,
        layout: Layout,
        here: Sequence[tuple[Range, torch.Tensor]],
        nodes: Mapping[str, tuple[Range, ...]],
        result: torch.Tensor,
    ) -> None:
        """`here` are the slots that I can read; `nodes` is what each party sends, which for me is the sum of these.

        The mean is in `result` afterwards. Nothing else is changed, so that all this can be done again.
        """
        parts = 1 if self._terms.small else len(self._parties)
        bounds = self._bounds(layout, parts)
        means = _cut(layout, result, bounds)
        mine = means[self._rank % parts]
        slots = [(node, _cut(layout, slot, bounds)) for node, slot in here]
        places = self._make_places(nodes, mine)
        if self._terms.small:
            self._gather_at_once(slots, nodes, places)
        else:
            self._gather_in_rounds(slots, nodes, places)
        operands = [(node, cut[self._rank % parts]) for node, cut in slots]
        operands += [(node, vectors) for (_, node), vectors in places.items()]
        operands.sort(key=lambda operand: operand[0])
        order = tuple(node for node, _ in operands)
        cuts = [
            Cut([vectors[index] for _, vectors in operands], out, bounds[index][self._rank % parts][0])
            for index, out in enumerate(mine)
        ]
        work = Work(layout, cuts, order, self._terms.shards, self._tellers, self._terms.draw(step))
        self.trusted = self._terms.aggregator.reduce(work)
        if not self._terms.small:
            self._hand_out(means)

    def _bounds(self, layout: Layout, parts: int) -> list[list[tuple[int, int]]]:
        """For each section its elements in so many parts."""
        if not self._shares:
            return [slice_bounds(section.elements, parts, section.dtype.itemsize) for section in layout.sections]
        runs = result_parts(layout, parts, self._terms.aggregator.unit_bytes(layout))
        return [[section.columns(run) for run in runs] for section in layout.sections]

    def _make_places(self, nodes: Mapping[str, tuple[Range, ...]], mine: Vectors) -> dict[tuple[str, Range], Vectors]:
        """Where the others' nodes go, as far as they are of my slice: the first where the mean will be, if it may."""
        foreign = [(party, node) for party in self._parties if party != self._group.me for node in nodes[party]]
        sizes = [_padded(vector.numel() * vector.element_size()) for vector in mine]
        need = sum(sizes) * max(0, len(foreign) - (not self._shares))
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8)
        places: dict[tuple[str, Range], Vectors] = {}
        offset = 0
        for key in foreign:
            if not places and not self._shares:
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


def _cut(layout: Layout, memory: torch.Tensor, bounds: Sequence[Sequence[tuple[int, int]]]) -> list[Vectors]:
    """A slot in parts, each with a run of every section."""
    result: list[Vectors] = [[] for _ in bounds[0]] if bounds else [[]]
    for runs, vector in zip(bounds, layout.vectors(memory), strict=True):
        for part, (start, stop) in enumerate(runs):
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
