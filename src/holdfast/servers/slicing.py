"""Which elements of which parameters a slice has. Pure.

Parameters lie one after another in the order that all workers agree on, and are cut into slices of even size in bytes.
A slice is a list of segments, each a run of one parameter's elements: parameters keep their dtype and their group of
the optimizer, whatever slices they are cut into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LINE_BYTES = 64  # cuts fall on cache lines of a parameter, so that no two slices write to the same one


@dataclass(frozen=True)
class Size:
    """Of a parameter."""

    elements: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Segment:
    """The elements `start` to `stop` of the parameter with this number."""

    parameter: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Slice:
    number: int
    segments: tuple[Segment, ...]

    def nbytes(self, sizes: Sequence[Size]) -> int:
        return sum(segment.elements * sizes[segment.parameter].itemsize for segment in self.segments)


def cut(sizes: Sequence[Size], slices: int) -> tuple[Slice, ...]:
    """All elements, each once, in `slices` slices whose sizes differ from the mean by less than a cache line.

    There are fewer slices where there are fewer lines than that: none is empty, but the only one of no parameters.
    """
    assert slices >= 1, slices
    total = sum(size.nbytes for size in sizes)
    edges = sorted({_snapped(sizes, total * part // slices) for part in range(1, slices)} - {(0, 0)})
    ends = [*edges, (len(sizes), 0)]
    found: list[tuple[Segment, ...]] = []
    start = (0, 0)
    for end in ends:
        if segments := tuple(_between(sizes, start, end)):
            found.append(segments)
        start = end
    return tuple(Slice(number, segments) for number, segments in enumerate(found or [()]))


def _snapped(sizes: Sequence[Size], position: int) -> tuple[int, int]:
    """The parameter and its element at so many bytes from the beginning, or at the last cache line before."""
    for parameter, size in enumerate(sizes):
        if position < size.nbytes:
            line = max(1, LINE_BYTES // size.itemsize)
            return parameter, position // size.itemsize // line * line
        position -= size.nbytes
    return len(sizes), 0


def _between(sizes: Sequence[Size], start: tuple[int, int], end: tuple[int, int]) -> Iterator[Segment]:
    for parameter in range(start[0], min(end[0] + 1, len(sizes))):
        first = start[1] if parameter == start[0] else 0
        last = end[1] if parameter == end[0] else sizes[parameter].elements
        if first < last:
            yield Segment(parameter, first, last)
