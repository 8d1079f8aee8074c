"""A robust rule as what becomes of a step's shards: every shard's gradient is one update.

Rows are shards, whoever computed them: what comes of a step does not depend on who did which part of it. f counts
shards, therefore. What a rule draws by chance is drawn anew in each step, from the run's seed. Members that share a
reduction read different columns; what each found there (inner products, counts, who is not finite) is told to the
others after every pass over the columns, and all go on from the same numbers.

Buffers are no gradients: their scale would hide those in every distance. Each of their numbers becomes the median over
shards, of whole numbers the lower one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np
import torch

from holdfast.byzantine.rules.columns import Median
from holdfast.byzantine.rules.port import Aggregate, Rule
from holdfast.byzantine.updates import Numbers, Piece, Result, Updates, Value
from holdfast.core.errors import TooFewUpdates
from holdfast.reduce.aggregators import Parties, Work
from holdfast.reduce.arena import result_parts
from holdfast.reduce.layout import PAGE_BYTES, Layout, round_up

BLOCKS_MAX = 256  # of a slot: so many tables of inner products are told at most
BLOCK_BYTES_MIN = 32 * 1024
COLUMNS = 64 * 1024  # of whole numbers, at a time


def block_bytes(layout: Layout) -> int:
    """Members cut a slot at multiples of this, and inner products are added up block by block, whoever has them."""
    return max(BLOCK_BYTES_MIN, round_up(-(-layout.slot_bytes // BLOCKS_MAX), PAGE_BYTES))


class RobustShards:
    """See the module. `least`: a step with fewer shards than the rule needs changes nothing."""

    by_shard = True
    shares = True

    def __init__(self, rule: Rule, f: int) -> None:
        self._rule = rule
        self._f = f
        self.least = rule.least(f)

    def unit_bytes(self, layout: Layout) -> int:
        return block_bytes(layout)

    def metric(self, values: Sequence[float]) -> float:
        """The median: a number that a hostile worker records is as hostile as its gradient."""
        return float(median(values))

    def reduce(self, work: Work) -> tuple[bool, ...]:
        parts = [_Part(work, index) for index in range(len(work.cuts))]
        floats = [part for part in parts if part.is_float]
        try:
            found = self._combined(work, floats)
        except TooFewUpdates:
            # More shards are not finite than were to be expected of hostile workers: the training itself diverges, and
            # whoever looks after that must see it. What the rest comes to is nobody's word, and is not applied.
            for part in floats:
                part.out.fill_(math.nan)
            found = (True,) * len(work.nodes)
        for part in parts:
            if not part.is_float:
                _lower_median(part.out, part.rows)
        return found

    def _combined(self, work: Work, floats: Sequence[_Part]) -> tuple[bool, ...]:
        rows = len(work.nodes)
        borne = min(self._f, (rows - 1) // 2)  # by a median
        found = self._rule.in_round(work.draw).combined(*self._rows(work, floats, self._f, buffers=False))
        if any(work.layout.gradients_in(section)[1] < section.elements for section in work.layout.sections):
            steady: Aggregate = Median().combined(*self._rows(work, floats, borne, buffers=True))
            return tuple(found.trusted[row] and steady.scores[row] != float("inf") for row in range(rows))
        return found.trusted

    def _rows(self, work: Work, floats: Sequence[_Part], f: int, *, buffers: bool) -> tuple[Updates, int, Result]:
        source = SlotRows(work, floats, buffers=buffers)
        return source, f, source.result(None)


class _Part:
    """One section's cut, of real numbers."""

    def __init__(self, work: Work, index: int) -> None:
        section, cut = work.layout.sections[index], work.cuts[index]
        self.is_float = section.dtype.is_floating_point or section.dtype.is_complex
        numbers = 2 if section.dtype.is_complex else 1
        real = torch.empty(0, dtype=section.dtype).real.dtype if section.dtype.is_complex else section.dtype
        self.key = str(index)
        self.dtype = real
        self.offset_bytes = section.offset_bytes
        self.rows = [operand.view(real) for operand in cut.operands]
        self.out = cut.out.view(real)
        self.start = cut.start * numbers
        self.gradients = work.layout.gradients_in(section)[1] * numbers

    def span(self, low: int, high: int, *, buffers: bool) -> Piece | None:
        """What lies in these bytes of the slot: gradients or buffers."""
        edges = [(edge - self.offset_bytes) // self.dtype.itemsize - self.start for edge in (low, high)]
        boundary = self.gradients - self.start
        first, last = (boundary, len(self.out)) if buffers else (0, boundary)
        begin, end = max(edges[0], first, 0), min(edges[1], last, len(self.out))
        if begin >= end:
            return None
        return Piece([row[begin:end] for row in self.rows], self.start + begin, self.key, self.start)


class SlotRows(Updates):
    """The gradients, or the buffers, of all shards, as far as this party has them."""

    def __init__(self, work: Work, floats: Sequence[_Part], *, buffers: bool) -> None:
        self.count = len(work.nodes)
        self.wide = any(part.dtype == torch.float64 for part in floats)
        self._parts = floats
        self._buffers = buffers
        self._parties: Parties = work.parties
        self._unit = block_bytes(work.layout)
        self._runs = result_parts(work.layout, work.parties.count, self._unit)

    def pieces(self) -> Iterator[Piece]:
        for block in self.blocks():
            yield from block

    def blocks(self) -> Iterator[Iterator[Piece]]:
        start, stop = self._runs[self._parties.rank]
        for low in range(start, stop, self._unit):
            yield self._block(low, min(low + self._unit, stop))

    def _block(self, low: int, high: int) -> Iterator[Piece]:
        for part in self._parts:
            piece = part.span(low, high, buffers=self._buffers)
            if piece is not None:
                yield piece

    def among_all(self, mine: Numbers, blocks: bool = False) -> list[Numbers]:
        """Runs of blocks follow each other as the parties do, so what they say of them does."""
        counts = [-(-(stop - start) // self._unit) if blocks else 1 for start, stop in self._runs]
        width = mine.shape[-1]
        told = self._parties.share(
            np.ascontiguousarray(mine, dtype=np.float64).tobytes(), [count * width * 8 for count in counts]
        )
        if blocks:
            return [np.frombuffer(b"".join(told)).reshape(-1, width)]
        return [np.frombuffer(one) for one in told]

    def result(self, out: Value | None) -> Result:
        return Result({}, {part.key: part.out for part in self._parts})


def _lower_median(out: torch.Tensor, rows: Sequence[torch.Tensor]) -> None:
    """Parts of whole numbers (modes/buffers.py): of those that most shards agree on, what they agree on."""
    for low in range(0, out.numel(), COLUMNS):
        stack = torch.stack([row[low : low + COLUMNS] for row in rows])
        whole = stack.to(torch.uint8) if stack.dtype == torch.bool else stack
        out[low : low + COLUMNS] = whole.median(dim=0).values.to(out.dtype)
