"""Where the tensors of a request lie in one run of bytes, and which of those bytes each rank needs.

Neighbours of one dtype make one section, a long vector, so that a group of tensors is added as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.arithmetic import scale
from holdfast.horovod.exchange.words import Kind, Request, Shape, share_of
from holdfast.state.layout import DTYPES

ALIGNMENT = 64
Ranges = list[tuple[int, int]]  # of bytes


@dataclass(frozen=True)
class Section:
    dtype: torch.dtype
    start: int  # bytes
    elements: int

    @property
    def stop(self) -> int:
        return self.start + self.elements * self.dtype.itemsize

    def vector(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.start : self.stop].view(self.dtype)

    def slice_of(self, part: int, parts: int) -> tuple[int, int]:
        """The elements that one of so many ranks adds; whole cache lines, but for the last."""
        step = max(1, ALIGNMENT // self.dtype.itemsize)
        lines = -(-self.elements // step)
        low, high = (min(self.elements, lines * edge // parts * step) for edge in (part, part + 1))
        return low, high


@dataclass(frozen=True)
class Packing:
    sections: tuple[Section, ...]
    starts: tuple[int, ...]  # of each tensor, in bytes
    nbytes: int


@lru_cache(maxsize=4096)
def packing(dtypes: tuple[str, ...], shapes: tuple[Shape, ...]) -> Packing:
    sections: list[Section] = []
    starts: list[int] = []
    at = 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = DTYPES.get(name)
        if dtype is None:
            raise ProtocolError(f"a request with the dtype {name!r:.40}")
        elements = math.prod(shape)
        if sections and sections[-1].dtype is dtype:
            last = sections[-1]
            starts.append(last.stop)
            sections[-1] = Section(dtype, last.start, last.elements + elements)
        else:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            starts.append(at)
            sections.append(Section(dtype, at, elements))
        at = sections[-1].stop
    return Packing(tuple(sections), tuple(starts), at)


def packing_of(request: Request) -> Packing:
    return packing(request.dtypes, request.shapes)


def tensor_at(memory: torch.Tensor, pack: Packing, request: Request, index: int) -> torch.Tensor:
    """The view of one tensor of a request in its bytes."""
    dtype, shape = DTYPES[request.dtypes[index]], request.shapes[index]
    start = pack.starts[index]
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def brought_bytes(request: Request, rank: int) -> int:
    """How much a rank brings to a collective."""
    if request.trouble or (request.kind is Kind.BROADCAST and request.root != rank):
        return 0
    pack = packing_of(request)
    return _row_bytes(pack) * max(0, len(request.nodes) - 1) + pack.nbytes  # the result's slice needs a place, too


def put(memory: torch.Tensor, pack: Packing, request: Request, tensors: Sequence[torch.Tensor]) -> None:
    """A copy of the tensors, scaled as they are to be before they meet others. With shards: set after set."""
    count = len(request.shapes)
    for number, start in enumerate(row_starts(request, pack)):
        row = memory[start:] if start else memory
        for index, tensor in enumerate(tensors[number * count : (number + 1) * count]):
            tensor_at(row, pack, request, index).copy_(tensor)
        if request.prescale != 1.0:
            for section in pack.sections:
                scale(section.vector(row), request.prescale)


def row_starts(request: Request, pack: Packing) -> list[int]:
    """Where the sets of tensors that a rank brings begin, in bytes: one, or with shards as many as it has nodes."""
    count = len(request.nodes) if request.shards else 1
    return [number * _row_bytes(pack) for number in range(count)]


def _row_bytes(pack: Packing) -> int:
    return -(-pack.nbytes // ALIGNMENT) * ALIGNMENT


def in_rows(request: Request, pack: Packing, ranges: Ranges) -> Ranges:
    """These bytes of each set of tensors."""
    if not request.shards:
        return ranges
    return [(at + start, at + stop) for at in row_starts(request, pack) for start, stop in ranges]


def slices(pack: Packing, part: int, parts: int) -> Ranges:
    """The bytes of a rank's part of an allreduce."""
    found = []
    for section in pack.sections:
        low, high = section.slice_of(part, parts)
        width = section.dtype.itemsize
        found.append((section.start + low * width, section.start + high * width))
    return found


def wanted(request: Request, sender: int, ranks: Sequence[int], taker: int) -> Ranges:
    """Which bytes of what `sender` brings `taker` needs first. An allreduce's result comes in a second phase."""
    pack = packing_of(request)
    if request.kind is Kind.REDUCESCATTER:
        return _rows(request, pack, ranks, taker)
    if request.kind is Kind.ALLTOALL:
        row = math.prod(request.shapes[0][1:]) * DTYPES[request.dtypes[0]].itemsize
        place = list(ranks).index(taker)
        before = sum(request.splits[:place])
        return [(before * row, (before + request.splits[place]) * row)]
    if request.kind is Kind.BROADCAST and sender != request.root:
        return []
    return in_rows(request, pack, [(0, pack.nbytes)]) if pack.nbytes else []


def _rows(request: Request, pack: Packing, ranks: Sequence[int], taker: int) -> Ranges:
    found = []
    place = list(ranks).index(taker)
    for name, shape, start in zip(request.dtypes, request.shapes, pack.starts, strict=True):
        share = share_of(shape[0], len(ranks))
        row = math.prod(shape[1:]) * DTYPES[name].itemsize
        low = start + sum(share[:place]) * row
        found.append((low, low + share[place] * row))
    return found
