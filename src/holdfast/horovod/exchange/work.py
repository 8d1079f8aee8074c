"""What a rank does in a collective that is complete: fetch the pieces that it needs, combine them, put them into place.

Small reductions take one phase: everybody gets everything and adds it for itself. Large ones take two: each rank adds
its slice of all tensors, and lets the others have it. One Work is one collective, driven by the exchange.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange import arithmetic
from holdfast.horovod.exchange.carrier import Carrier
from holdfast.horovod.exchange.matching import Announced, Matched
from holdfast.horovod.exchange.packing import Packing, Ranges, in_rows, packing_of, slices, tensor_at, wanted
from holdfast.horovod.exchange.words import Kind, Op, Request, share_of
from holdfast.state.layout import DTYPES

# Up to here everybody adds everything. Beyond, a second phase costs less than to add it all several times; between two
# ranks it never does.
SMALL_BYTES = 256 * 1024
STRAIGHT_BYTES = 16 * 1024  # from here on, on average, a tensor is worth a call of its own
Results = list[torch.Tensor]


@dataclass
class Submission:
    """What this rank has submitted: its request, the memory that holds its data, and where results go, if that is
    known already."""

    request: Request
    serial: int
    memory: torch.Tensor
    outputs: Sequence[torch.Tensor] | None = None
    offset: int | None = None  # of the carrier's room, to be given back


@dataclass
class Work:
    matched: Matched
    mine: Submission
    me: int
    members: Sequence[int]  # of the process set, also those who have joined and take no part
    phase: int = 1
    results: Results = field(default_factory=list)
    splits: tuple[int, ...] = ()  # of what is gathered: how many rows came from each rank

    def __post_init__(self) -> None:
        request = self.mine.request
        self.ranks = self.matched.ranks
        self.serials = {rank: one.serial for rank, one in self.matched.parts.items()}
        self.pack: Packing = packing_of(request)
        self.finish = arithmetic.finishing(request.op, request.shards or len(self.members), request.postscale)
        self.leaves = self._leaves()
        self.two_phases = (
            request.kind is Kind.ALLREDUCE
            and request.op is not Op.ADASUM
            and len(self.ranks) > 2
            and self.pack.nbytes > SMALL_BYTES
        )

    def _leaves(self) -> arithmetic.Leaves | None:
        shards = self.mine.request.shards
        nodes = [node for rank in self.ranks for node in self.matched.parts[rank].request.nodes]
        return (shards, tuple(nodes)) if shards else None

    # ---- which bytes

    def wanted(self) -> dict[int, Ranges]:
        """Of each other rank, in this phase; those that came with the announcement need not be fetched."""
        found = {}
        for rank in self.ranks:
            if rank == self.me or (self.phase == 1 and self.matched.parts[rank].inline is not None):
                continue
            if ranges := self._of(self.matched.parts[rank].request, rank, self.me):
                found[rank] = ranges
        return found

    def given(self) -> dict[int, Ranges]:
        """What each other rank wants of me, in this phase."""
        if self.phase == 1 and self.matched.parts[self.me].inline is not None:
            return {}
        found = {rank: self._of(self.mine.request, self.me, rank) for rank in self.ranks if rank != self.me}
        return {rank: ranges for rank, ranges in found.items() if ranges}

    def _of(self, request: Request, sender: int, taker: int) -> Ranges:
        if self.two_phases:
            part = self.ranks.index(taker if self.phase == 1 else sender)
            ranges = slices(self.pack, part, len(self.ranks))
            return in_rows(request, self.pack, ranges) if self.phase == 1 else ranges
        return wanted(request, sender, self.ranks, taker)

    # ---- doing it

    def perform(self, carrier: Carrier) -> bool:
        """All that is wanted is here. True: the collective is done; False: another phase begins."""
        kind = self.mine.request.kind
        if self.phase == 2:
            self._put_together(carrier)
            return True
        if self.two_phases:
            self._add_slice(carrier)
            return False
        if kind is Kind.ALLREDUCE:
            self._add_all(carrier)
        elif kind is Kind.REDUCESCATTER:
            self._add_rows(carrier)
        elif kind is Kind.ALLGATHER:
            self._gather(carrier)
        elif kind is Kind.ALLTOALL:
            self._take_splits(carrier)
        elif kind is Kind.BROADCAST:
            self._take_root(carrier)
        return True

    def _fetched(self, carrier: Carrier, rank: int, ranges: Ranges) -> list[torch.Tensor]:
        """The bytes of these ranges of what a rank brought."""
        announced = self.matched.parts[rank]
        if rank == self.me:
            return [self.mine.memory[start:stop] for start, stop in ranges]
        if announced.inline is not None and self.phase == 1:
            whole = _whole(announced)
            return [whole[start:stop] for start, stop in ranges]
        block = (announced.offset, announced.length)
        return carrier.pieces(rank, announced.serial, self.phase, block, ranges)

    def _add_all(self, carrier: Carrier) -> None:
        request, pack = self.mine.request, self.pack
        brought = self._brought(carrier, [(0, pack.nbytes)]) if pack.nbytes else []
        if not brought:
            self._put_out(self.mine.memory)
        elif request.op is not Op.ADASUM and self._is_straight() and self._is_worth_calls():
            self._add_straight(brought)
        else:
            self._add_sections(brought)

    def _brought(self, carrier: Carrier, ranges: Ranges) -> list[torch.Tensor]:
        """These bytes of all that ranks bring, in their order; of each set of tensors one range after the other."""
        found = []
        for rank in self.ranks:
            found += self._fetched(carrier, rank, in_rows(self.matched.parts[rank].request, self.pack, ranges))
        return found

    def _is_straight(self) -> bool:
        """Whether results can be written where they go, without a copy in between."""
        return self.mine.outputs is not None and all(out.is_contiguous() for out in self.mine.outputs)

    def _is_worth_calls(self) -> bool:
        count = len(self.mine.request.shapes)
        return count == 1 or self.pack.nbytes >= STRAIGHT_BYTES * count

    def _add_straight(self, brought: Sequence[torch.Tensor]) -> None:
        assert self.mine.outputs is not None
        request = self.mine.request
        for index, out in enumerate(self.mine.outputs):
            operands = [tensor_at(one, self.pack, request, index).view(-1) for one in brought]
            arithmetic.combine(out.view(-1), operands, request.op, self.finish, self.leaves)
        self.results = list(self.mine.outputs)

    def _add_sections(self, brought: Sequence[torch.Tensor]) -> None:
        request, pack = self.mine.request, self.pack
        total = torch.empty(pack.nbytes, dtype=torch.uint8)
        for section in pack.sections:
            target, operands = section.vector(total), [section.vector(one) for one in brought]
            if request.op is Op.ADASUM:
                target.copy_(arithmetic.adasum(operands, self._tensors_in(section.start, section.stop)))
                arithmetic.scale(target, request.postscale)
            else:
                arithmetic.combine(target, operands, request.op, self.finish, self.leaves)
        self._put_out(total)

    def _tensors_in(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The elements of each tensor of a section, for what is decided a tensor at a time."""
        edges = [one for one in self.pack.starts if start <= one < stop]
        width = next(section.dtype.itemsize for section in self.pack.sections if section.start == start)
        return [
            ((low - start) // width, (high - start) // width)
            for low, high in zip(edges, [*edges[1:], stop], strict=True)
        ]

    def _add_slice(self, carrier: Carrier) -> None:
        """Into my own memory, where only I read this slice."""
        request = self.mine.request
        ranges = slices(self.pack, self.ranks.index(self.me), len(self.ranks))
        brought, count = self._brought(carrier, ranges), len(ranges)
        for index, section in enumerate(self.pack.sections):
            start, stop = ranges[index]
            if start == stop:
                continue
            out = self.mine.memory[start:stop].view(section.dtype)
            operands = [part.view(section.dtype) for part in brought[index::count]]
            arithmetic.combine(out, operands, request.op, self.finish, self.leaves)
        self.phase = 2

    def _put_together(self, carrier: Carrier) -> None:
        """All slices, mine and the others', into the outputs that they belong to."""
        straight, pack = self._is_straight(), self.pack
        targets = [out.view(-1).view(torch.uint8) for out in self.mine.outputs or ()] if straight else []
        if not straight:
            targets = [torch.empty(pack.nbytes, dtype=torch.uint8)]
        starts = pack.starts if straight else (0,)
        for place, rank in enumerate(self.ranks):
            ranges = slices(pack, place, len(self.ranks))
            for (start, stop), piece in zip(ranges, self._fetched(carrier, rank, ranges), strict=True):
                _spread(piece, start, stop, starts, targets)
        if straight:
            self.results = list(self.mine.outputs or ())
        else:
            self._put_out(targets[0])

    def _put_out(self, memory: torch.Tensor) -> None:
        request = self.mine.request
        views = [tensor_at(memory, self.pack, request, index) for index in range(len(request.shapes))]
        if self.mine.outputs is None:
            self.results = views
            return
        for out, view in zip(self.mine.outputs, views, strict=True):
            out.copy_(view)
        self.results = list(self.mine.outputs)

    def _add_rows(self, carrier: Carrier) -> None:
        request = self.mine.request
        place = self.ranks.index(self.me)
        ranges = wanted(request, self.me, self.ranks, self.me)
        brought = [self._fetched(carrier, rank, ranges) for rank in self.ranks]
        for index, (name, shape) in enumerate(zip(request.dtypes, request.shapes, strict=True)):
            dtype = DTYPES[name]
            out = torch.empty((share_of(shape[0], len(self.ranks))[place], *shape[1:]), dtype=dtype)
            if out.numel():
                flat = out.view(-1)
                arithmetic.combine(flat, [parts[index].view(dtype) for parts in brought], request.op, self.finish)
            self.results.append(out)

    def _gather(self, carrier: Carrier) -> None:
        request = self.mine.request
        brought = {}
        for rank in self.ranks:
            theirs = self.matched.parts[rank].request
            pack = packing_of(theirs)
            parts = self._fetched(carrier, rank, [(0, pack.nbytes)]) if pack.nbytes else [self.mine.memory[:0]]
            brought[rank] = (theirs, pack, parts[0])
        for index in range(len(request.shapes)):
            views = [tensor_at(memory, pack, theirs, index) for theirs, pack, memory in brought.values()]
            self.results.append(torch.cat(views))
        self.splits = tuple(theirs.shapes[0][0] for theirs, _, _ in brought.values())

    def _take_splits(self, carrier: Carrier) -> None:
        request, place = self.mine.request, self.ranks.index(self.me)
        dtype, row = DTYPES[request.dtypes[0]], request.shapes[0][1:]
        parts = []
        for rank in self.ranks:
            theirs = self.matched.parts[rank].request
            (piece,) = self._fetched(carrier, rank, wanted(theirs, rank, self.ranks, self.me))
            parts.append(piece.view(dtype).view(theirs.splits[place], *row))
        self.results = [torch.cat(parts)]
        self.splits = tuple(self.matched.parts[rank].request.splits[place] for rank in self.ranks)

    def _take_root(self, carrier: Carrier) -> None:
        request = self.mine.request
        if request.root not in self.ranks:
            raise ProtocolError(f"rank {request.root} is not in this process set")
        root = self.mine.memory
        if self.pack.nbytes:
            (root,) = self._fetched(carrier, request.root, [(0, self.pack.nbytes)])
        # Where results have no place yet they are taken later, when the root may use its memory for something else.
        self._put_out(root if self.mine.outputs is not None else root.clone())


def _whole(announced: Announced) -> torch.Tensor:
    if not announced.inline:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(announced.inline), dtype=torch.uint8)


def _spread(piece: torch.Tensor, start: int, stop: int, starts: Sequence[int], targets: Sequence[torch.Tensor]) -> None:
    """Bytes [start, stop) into the targets, which begin at `starts`."""
    for index in range(max(0, bisect_right(starts, start) - 1), len(targets)):
        low, high = max(start, starts[index]), min(stop, starts[index] + targets[index].numel())
        if starts[index] >= stop:
            return
        if low < high:
            targets[index][low - starts[index] : high - starts[index]].copy_(piece[low - start : high - start])
