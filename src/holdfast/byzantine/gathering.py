"""One round's updates as a rule sees them: who is still in it, how they are mixed, and the three passes over their
columns.

A pass reads every update once, in pieces, and needs a tile of memory. What is found not to be finite ends the pass
with `NotFinite`; whoever called takes those updates out and begins again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.byzantine.arithmetic import product, total
from holdfast.byzantine.kernels.choosing import kernels
from holdfast.byzantine.kernels.port import PAGE, Flags, Matrix, Order
from holdfast.byzantine.updates import Piece, Result, Updates
from holdfast.core.errors import ConfigError

CONVERTED_BYTES = 4 << 20  # of all updates, at a time, where numbers must be converted


class NotFinite(Exception):
    """These updates, by their place among those that were asked, have numbers that are not finite."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(f"updates {list(places)} are not finite")
        self.places = tuple(places)


@dataclass(frozen=True)
class Gathered:
    """`live`: the updates that take part; `mix`: combinations of those, which take their place; `f` of the n are
    hostile.
    """

    source: Updates
    live: tuple[int, ...]
    f: int
    result: Result
    weights: Matrix | None = None
    mix: Matrix | None = None

    @property
    def n(self) -> int:
        return len(self.live) if self.mix is None else len(self.mix)

    def mixed(self, factors: Matrix, weights: Matrix | None) -> Gathered:
        """With these combinations of the updates in their place."""
        combined = factors if self.mix is None else product(factors, self.mix)
        return replace(self, mix=np.ascontiguousarray(combined), weights=weights)

    def shares(self) -> Matrix:
        """What each update counts for in a mean; together one."""
        if self.weights is None:
            return np.full(self.n, 1.0 / self.n)
        shares: Matrix = self.weights / np.add.accumulate(self.weights)[-1]
        return shares

    def order(self, order: Order) -> tuple[Matrix, Result]:
        """Writes a statistic of every column to the result. Also: in which part of the columns each update was
        outside.
        """
        outside, counted = np.zeros(self.n), 0
        bad = np.zeros(len(self.live), dtype=bool)
        for piece, rows, start in self._native(self.source.pieces(), None, None):
            out = _place(self.result, piece, start, rows[0])
            done = kernels(rows[0].dtype).order(rows, self.mix, self.weights, order, piece.start + start, out.native)
            out.write()
            bad |= done.bad
            outside += done.outside
            counted += done.counted
        told = self.source.among_all(np.concatenate([[float(counted)], outside, bad]))
        found = total(np.stack(told, axis=1))  # whole numbers: exact in any order
        self._complain(found[1 + self.n :] > 0)
        return found[1 : 1 + self.n] / max(found[0], 1.0), self.result

    def gram(self, *, origin: bool = False, beside: Result | None = None) -> Matrix:
        """Inner products of the updates around a point in their middle; last of all `beside`, or the origin."""
        real = torch.float64 if self.source.wide else torch.float32
        rows, mix, sums = len(self.live) + (beside is not None), self._mix_beside(beside), []
        size = (rows if mix is None else len(mix)) + origin
        for block in self.source.blocks():
            pages = _Pages(rows, real, mix, origin)
            for _, native, _ in self._native(block, beside, real):
                pages.feed(native)
            pages.flush()
            sums.append(np.concatenate([pages.sum.reshape(-1), pages.bad]))
        mine: Matrix = np.array(sums).reshape(len(sums), size * size + rows)
        (blocks,) = self.source.among_all(mine, blocks=True)
        together = total(blocks.T)  # block after block
        self._complain(together[size * size :] > 0)
        upper = np.triu(together[: size * size].reshape(size, size))
        found: Matrix = upper + np.triu(upper, 1).T
        return found

    def combine(self, factors: Matrix, *, beside: Result | None = None, beside_factor: float = 0.0) -> Result:
        """Writes the combination with these factors to the result, which may be `beside` itself."""
        if self.mix is not None:
            factors = product(self.mix.T, factors)
        if beside is not None:
            factors = np.append(factors, beside_factor)
        read = [int(place) for place in np.flatnonzero(factors)] or [0]  # what counts for nothing need not be read
        bad, few = np.zeros(len(factors), dtype=bool), np.ascontiguousarray(factors[read])
        for piece, rows, start in self._native(self.source.pieces(), beside, None, read):
            out = _place(self.result, piece, start, rows[0])
            bad[read] |= kernels(rows[0].dtype).combine(rows, few, out.native)
            out.write()
        told = self.source.among_all(bad.astype(np.float64))
        self._complain(total(np.stack(told, axis=1)) > 0)
        return self.result

    def _mix_beside(self, beside: Result | None) -> Matrix | None:
        if self.mix is None or beside is None:
            return self.mix
        wider = np.zeros((self.n + 1, len(self.live) + 1))
        wider[:-1, :-1] = self.mix
        wider[-1, -1] = 1.0
        return wider

    def _complain(self, bad: Flags) -> None:
        if bad[: len(self.live)].any():
            raise NotFinite([int(place) for place in np.flatnonzero(bad[: len(self.live)])])
        if bad.any():
            raise ConfigError(
                "the value to start from is not finite", hint="start from the last round's, or leave it away"
            )

    def _native(
        self,
        pieces: Iterator[Piece],
        beside: Result | None,
        real: torch.dtype | None,
        read: Sequence[int] | None = None,
    ) -> Iterator[tuple[Piece, list[torch.Tensor], int]]:
        """Pieces as kernels take them, with where they begin in the piece; converted block by block where they must
        be.
        """
        for piece in pieces:
            rows = [piece.rows[number] for number in self.live]
            if beside is not None:
                rows.append(beside.span(piece))
            if read is not None:
                rows = [rows[place] for place in read]
            wanted = real or (torch.float64 if _needs_wide(rows[0]) else torch.float32)
            width = len(rows[0])
            if all(row.dtype == wanted and row.is_contiguous() and row.device.type == "cpu" for row in rows):
                yield piece, rows, 0
                continue
            step = max(PAGE, CONVERTED_BYTES // (wanted.itemsize * len(rows)) // PAGE * PAGE)
            for start in range(0, width, step):
                stop = min(start + step, width)
                block = [row[start:stop].to(device="cpu", dtype=wanted).contiguous() for row in rows]
                yield piece, block, start


class _Pages:
    """Cuts columns at pages, wherever the pieces end, and adds the pages' sums up in their order."""

    def __init__(self, rows: int, real: torch.dtype, mix: Matrix | None, origin: bool) -> None:
        count = (rows if mix is None else len(mix)) + origin
        self.sum: Matrix = np.zeros((count, count))
        self.bad: Flags = np.zeros(rows, dtype=bool)
        self._carried = torch.empty(rows, PAGE, dtype=real)
        self._filled = 0
        self._mix, self._origin = mix, origin

    def feed(self, rows: list[torch.Tensor]) -> None:
        start, width = 0, len(rows[0])
        if self._filled:
            start = self._carry(rows, 0, min(PAGE - self._filled, width))
            if self._filled == PAGE:
                self.flush()
        whole = start + (width - start) // PAGE * PAGE
        if whole > start:
            self._add([row[start:whole] for row in rows])
        if whole < width and not self._filled:
            self._carry(rows, whole, width)

    def flush(self) -> None:
        if self._filled:
            self._add([row[: self._filled] for row in self._carried])
        self._filled = 0

    def _carry(self, rows: list[torch.Tensor], start: int, stop: int) -> int:
        for carried, row in zip(self._carried, rows, strict=True):
            carried[self._filled : self._filled + stop - start] = row[start:stop]
        self._filled += stop - start
        return stop

    def _add(self, rows: list[torch.Tensor]) -> None:
        pages, bad = kernels(rows[0].dtype).gram(rows, self._mix, self._origin)
        self.bad |= bad
        for page in pages:
            self.sum = self.sum + page


@dataclass(frozen=True)
class _Place:
    """Where a kernel writes, and where that belongs if it must be converted."""

    native: torch.Tensor
    final: torch.Tensor

    def write(self) -> None:
        if self.native is not self.final:
            self.final.copy_(self.native if self.final.dtype.is_floating_point else self.native.round())


def _place(result: Result, piece: Piece, start: int, row: torch.Tensor) -> _Place:
    final = result.span(piece)[start : start + len(row)]
    if final.dtype == row.dtype and final.device.type == "cpu":
        return _Place(final, final)
    return _Place(torch.empty(len(row), dtype=row.dtype), final)


def _needs_wide(row: torch.Tensor) -> bool:
    return not row.dtype.is_floating_point or row.dtype == torch.float64
