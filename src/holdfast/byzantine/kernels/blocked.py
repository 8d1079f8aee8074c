"""The same as columns.c with torch, block by block, for machines without a compiler. Every bit is the same.

Only operations on single numbers are used, which every processor rounds alike; a multiplication and an addition are
never one call, since torch fuses those on some processors. The one matrix product is of whole numbers, exact in any
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from holdfast.byzantine.kernels.networks import Comparator, sorting_network
from holdfast.byzantine.kernels.port import (
    BITS,
    COUNTED_EVERY,
    GRAM_MAX,
    GRAM_MIN,
    GROUP,
    MAGNITUDE_MAX,
    PAGE,
    Counts,
    Flags,
    Kind,
    Matrix,
    Order,
    Ordered,
)

BLOCK_BYTES = 4 << 20  # of one block of all updates, in float64
Values = list[torch.Tensor]


class BlockedKernels:
    """Plain torch, in blocks that fit a cache."""

    def order(
        self,
        rows: Sequence[torch.Tensor],
        mix: Matrix | None,
        weights: Matrix | None,
        order: Order,
        offset: int,
        out: torch.Tensor,
    ) -> Ordered:
        width, network = len(out), order.network(weights is not None)
        bad = np.zeros(len(rows), dtype=bool)
        outside = np.zeros(order.rows + 1, dtype=np.int64)
        for start, stop in _blocks(width, max(len(rows), order.rows), GROUP):
            block = [row[start:stop] for row in rows]
            bad |= _not_finite(block)
            updates = _mixed(block, mix)
            if weights is None:
                values, by = _sorted(updates, network), None
            else:
                values, by = _sorted_with_weights(updates, weights, network)
            out[start:stop] = _statistic(values, by, order) + 0.0  # one zero only, the positive one
            low, high = values[order.trim], values[order.rows - 1 - order.trim]
            outside += _outside(updates, low, high, offset + start)
        return Ordered(bad, outside[:-1], int(outside[-1]))

    def gram(self, rows: Sequence[torch.Tensor], mix: Matrix | None, origin: bool) -> tuple[Matrix, Flags]:
        width, bad = len(rows[0]), np.zeros(len(rows), dtype=bool)
        found = []
        for start, stop in _blocks(width, len(rows), PAGE):
            block = [row[start:stop] for row in rows]
            bad |= _not_finite(block)
            updates = _mixed(block, mix)
            if origin:
                updates.append(torch.zeros_like(updates[0]))
            found.append(_gram_pages(updates))
        return np.concatenate(found), bad

    def combine(self, rows: Sequence[torch.Tensor], factors: Matrix, out: torch.Tensor) -> Flags:
        bad = np.zeros(len(rows), dtype=bool)
        for start, stop in _blocks(len(out), len(rows), GROUP):
            block = [row[start:stop] for row in rows]
            bad |= _not_finite(block)
            out[start:stop] = _sum(block, factors) + 0.0
        return bad


def _blocks(width: int, rows: int, unit: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // (8 * rows * unit)) * unit
    for start in range(0, width, step):
        yield start, min(start + step, width)


def _not_finite(block: Values) -> Flags:
    largest = [row.abs().max() if len(row) else row.new_zeros(()) for row in block]
    return ~(torch.stack(largest) <= MAGNITUDE_MAX).numpy()  # NaN compares as false


def _sum(block: Values, factors: Matrix) -> torch.Tensor:
    total = torch.zeros(len(block[0]), dtype=torch.float64)
    for row, factor in zip(block, factors, strict=True):
        if factor != 0.0:
            total += row.double() * float(factor)
    return total


def _mixed(block: Values, mix: Matrix | None) -> Values:
    return list(block) if mix is None else [_sum(block, factors).to(block[0].dtype) for factors in mix]


def _sorted(updates: Values, network: tuple[Comparator, ...]) -> Values:
    values = list(updates)
    for low, high in network:
        values[low], values[high] = torch.minimum(values[low], values[high]), torch.maximum(values[low], values[high])
    return values


def _sorted_with_weights(updates: Values, weights: Matrix, network: tuple[Comparator, ...]) -> tuple[Values, Values]:
    values = list(updates)
    by = [torch.full_like(row, float(weight)) for row, weight in zip(updates, weights, strict=True)]
    for low, high in network:
        a, b, p, q = values[low], values[high], by[low], by[high]
        in_order = (a < b) | ((a == b) & (p <= q))
        values[low], values[high] = torch.where(in_order, a, b), torch.where(in_order, b, a)
        by[low], by[high] = torch.where(in_order, p, q), torch.where(in_order, q, p)
    return values, by


def _statistic(values: Values, by: Values | None, order: Order) -> torch.Tensor:
    if order.kind is Kind.TRIMMED:
        last = order.rows - order.trim
        return _mean(values[order.trim : last], None if by is None else by[order.trim : last])
    middle = _median(values) if by is None else _weighted_median(values, by)
    return middle if order.kind is Kind.MEDIAN else _nearest(values, by, order.kept, middle)


def _mean(values: Values, by: Values | None) -> torch.Tensor:
    total, weight = torch.zeros(len(values[0]), dtype=torch.float64), torch.zeros(len(values[0]), dtype=torch.float64)
    for number, row in enumerate(values):
        total += row.double() if by is None else by[number].double() * row.double()
        weight += 1.0 if by is None else by[number].double()
    return total / weight


def _median(values: Values) -> torch.Tensor:
    return (values[(len(values) - 1) // 2].double() + values[len(values) // 2].double()) * 0.5


def _weighted_median(values: Values, by: Values) -> torch.Tensor:
    half = torch.zeros(len(values[0]), dtype=torch.float64)
    for weight in by:
        half += weight.double()
    half *= 0.5
    below = torch.zeros_like(half)
    low = high = values[0].double()
    for number, (row, weight) in enumerate(zip(values, by, strict=True)):
        if number:
            low = torch.where(below < half, row.double(), low)
            high = torch.where((below <= half) & (weight > 0), row.double(), high)
        below += weight.double()
    return (low + high) * 0.5


def _nearest(values: Values, by: Values | None, kept: int, middle: torch.Tensor) -> torch.Tensor:
    total, weight = torch.zeros_like(middle), torch.zeros_like(middle)
    for number, row in enumerate(values):
        here = row.double()
        share = torch.ones_like(middle) if by is None else by[number].double()
        if number < len(values) - kept:
            goes = (values[number + kept].double() - middle) < (middle - here)
            share = torch.where(goes, 0.0, share)
        if number >= kept:
            stays = (here - middle) < (middle - values[number - kept].double())
            share = torch.where(stays, share, 0.0)
        total += share * here
        weight += share
    return total / weight


def _outside(updates: Values, low: torch.Tensor, high: torch.Tensor, start: int) -> Counts:
    place = torch.arange(start, start + len(low)) // GROUP
    looked_at = place % COUNTED_EVERY == 0
    flags = torch.stack([((row < low) | (row > high)) & looked_at for row in updates])
    return np.append(flags.sum(dim=1).numpy(), int(flags.any(dim=0).sum()))


def _gram_pages(updates: Values) -> Matrix:
    """Partial sums of a few pages. All products and their sums within a group are whole numbers below 2^53."""
    count, width = len(updates), len(updates[0])
    pages = -(-width // PAGE)
    reference = _sorted(updates, sorting_network(count, frozenset({(count - 1) // 2})))[(count - 1) // 2].double()
    whole = torch.zeros(count, pages * PAGE, dtype=torch.float64)
    for number, row in enumerate(updates):
        torch.sub(row.double(), reference, out=whole[number, :width])
    whole = whole.view(count, -1, GROUP)
    largest = whole.abs().amax(dim=2).numpy()
    usable = (largest > GRAM_MIN) & (largest < GRAM_MAX)
    exponent = np.frexp(np.where(usable, largest, 1.0))[1]
    scale = np.where(usable, np.ldexp(1.0, BITS - exponent), 0.0)
    unit = torch.from_numpy(np.where(usable, np.ldexp(1.0, exponent - BITS), 0.0)).T
    whole = torch.where(torch.from_numpy(usable).unsqueeze(2), whole, 0.0).mul_(torch.from_numpy(scale).unsqueeze(2))
    groups = whole.round_().transpose(0, 1).contiguous()
    products = torch.bmm(groups, groups.transpose(1, 2)) * (unit.unsqueeze(2) * unit.unsqueeze(1))
    products = products.view(pages, PAGE // GROUP, count, count)
    sums = torch.zeros(pages, count, count, dtype=torch.float64)
    for number in range(PAGE // GROUP):
        sums += products[:, number]
    return sums.numpy()
