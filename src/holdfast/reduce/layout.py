"""Where each gradient and buffer lies in a flat slot, so that a sum over shards is a sum of a few long vectors.

A slot is a run of bytes: one section for each dtype, in a fixed order, and in it one span for each tensor. All
members of a view compute the same layout, since they have the same parameters with the same `requires_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Section:
    """All tensors of one dtype, one after the other."""

    dtype: torch.dtype
    offset_bytes: int
    elements: int
    entries: tuple[int, ...]  # which of the layout's tensors
    starts: tuple[int, ...]  # where each begins, in elements

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def columns(self, part: tuple[int, int]) -> tuple[int, int]:
        """Which of its elements lie in these bytes of a slot, which begin and end on pages."""
        low, high = (min(max(edge - self.offset_bytes, 0), self.bytes) for edge in part)
        return low // self.dtype.itemsize, high // self.dtype.itemsize


class Layout:
    """The places of `tensors` in a slot of `slot_bytes` bytes. The first `gradients` of them are that, the rest is
    buffers; None: all are."""

    def __init__(self, tensors: Sequence[torch.Tensor], gradients: int | None = None) -> None:
        self.gradients = len(tensors) if gradients is None else gradients
        self.shapes = tuple(tensor.shape for tensor in tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        sections = []
        offset = 0
        for dtype in sorted(by_dtype, key=str):
            starts = []
            elements = 0
            for index in by_dtype[dtype]:
                starts.append(elements)
                elements += tensors[index].numel()
            sections.append(Section(dtype, offset, elements, tuple(by_dtype[dtype]), tuple(starts)))
            offset = round_up(offset + elements * dtype.itemsize, 64)
        self.sections = tuple(sections)
        self.slot_bytes = round_up(max(offset, 1), PAGE_BYTES)

    def vectors(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A slot's bytes as one vector for each section."""
        return tuple(
            memory[section.offset_bytes : section.offset_bytes + section.bytes].view(section.dtype)
            for section in self.sections
        )

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """A slot's bytes as one tensor for each of the layout's tensors, in their order and shape."""
        found: dict[int, torch.Tensor] = {}
        for section, vector in zip(self.sections, self.vectors(memory), strict=True):
            for index, start in zip(section.entries, section.starts, strict=True):
                shape = self.shapes[index]
                found[index] = vector[start : start + shape.numel()].view(shape)
        return [found[index] for index in range(len(self.shapes))]

    def gradients_in(self, section: Section) -> tuple[int, int]:
        """How many of a section's tensors are gradients, and where they end: buffers come after them."""
        count = sum(index < self.gradients for index in section.entries)
        return count, section.starts[count] if count < len(section.starts) else section.elements


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def slice_bounds(elements: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """`elements` in `parts` even runs that begin on a cache line."""
    line = max(1, 64 // itemsize)
    lines = -(-elements // line)
    edges = [min(elements, lines * part // parts * line) for part in range(parts + 1)]
    return list(pairwise(edges))
