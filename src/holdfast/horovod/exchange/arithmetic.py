"""How the tensors of several ranks become one: the only place of an exchange where numbers meet.

A sum over n ranks has the shape of the canonical tree over n leaves (reduce/tree.py), whoever adds, in how many pieces,
and whether through shared memory or over the network: every path gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from holdfast.horovod.exchange.words import Op
from holdfast.reduce.arithmetic import CHUNK_ELEMENTS, program
from holdfast.reduce.tree import Range

Binary = Callable[..., torch.Tensor]
Leaves = tuple[int, tuple[Range, ...]]  # of how many leaves the sum is, and which nodes of their tree the operands are
_OPERATIONS: dict[Op, Binary] = {
    Op.AVERAGE: torch.add,
    Op.SUM: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.PRODUCT: torch.mul,
}
_OF_BOOL: dict[Op, Binary] = {
    Op.SUM: torch.logical_or,
    Op.MAX: torch.logical_or,
    Op.MIN: torch.logical_and,
    Op.PRODUCT: torch.logical_and,
}
_NO_ARITHMETIC = {getattr(torch, name, None) for name in ("uint16", "uint32", "uint64")}


def check_op(op: Op, dtype: torch.dtype) -> str:
    """Why this cannot be; empty if it can."""
    if dtype is torch.bool and op not in _OF_BOOL:
        return f"{op.word} of bool: use Min (and), Max (or), or another dtype"
    if dtype in _NO_ARITHMETIC:
        return f"{op.word} of {dtype}, which torch cannot compute with: use int64"
    if dtype.is_complex and op in (Op.MIN, Op.MAX, Op.ADASUM):
        return f"{op.word} of {dtype}, which has no order"
    if op is Op.ADASUM and not dtype.is_floating_point:
        return f"Adasum of {dtype}: it is for floating-point numbers"
    return ""


def combine(
    out: torch.Tensor,
    operands: Sequence[torch.Tensor],
    op: Op,
    finish: Callable[[torch.Tensor], None] | None = None,
    leaves: Leaves | None = None,
) -> None:
    """out = all operands, flat and of one length, combined in tree order. `out` may be one of them.

    `finish` is called with each part of `out` while it is in the cache. `leaves`: what the operands are; without it
    each is a leaf.
    """
    operation = (_OF_BOOL if out.dtype is torch.bool else _OPERATIONS)[op]
    count, length = len(operands), out.numel()
    if count == 1 and out.data_ptr() != operands[0].data_ptr():
        out.copy_(operands[0])
    total, nodes = leaves or (count, tuple((leaf, leaf + 1) for leaf in range(count)))
    operations, temporaries = program(total, nodes, partial=leaves is not None)
    spare = [torch.empty(min(length, CHUNK_ELEMENTS), dtype=out.dtype) for _ in range(temporaries if count > 2 else 0)]
    for low in range(0, length, CHUNK_ELEMENTS):
        high = min(low + CHUNK_ELEMENTS, length)
        target = out[low:high]
        if count == 2:
            operation(operands[0][low:high], operands[1][low:high], out=target)
        elif count > 2:
            registers = [operand[low:high] for operand in operands]
            registers += [temporary[: high - low] for temporary in spare]
            for left, right, to in operations[:-1]:
                operation(registers[left], registers[right], out=registers[to])
            left, right, _ = operations[-1]
            operation(registers[left], registers[right], out=target)
        if finish is not None:
            finish(target)


def scale(tensor: torch.Tensor, factor: float) -> None:
    """In place. Whole numbers are scaled as float64 and cut, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).to(tensor.dtype))


def finishing(op: Op, size: int, postscale: float) -> Callable[[torch.Tensor], None] | None:
    """What comes after the sum, if anything does."""
    if (op is not Op.AVERAGE or size == 1) and postscale == 1.0:
        return None
    return lambda tensor: finish(tensor, op, size, postscale)


def finish(tensor: torch.Tensor, op: Op, size: int, postscale: float) -> None:
    """In place: what comes after the sum. `size` is that of the process set, also where some have joined."""
    if op is Op.AVERAGE and size > 1:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.div_(size)
        else:
            tensor.copy_(torch.div(tensor, size, rounding_mode="trunc"))
    scale(tensor, postscale)


def adasum(operands: Sequence[torch.Tensor], sections: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Adasum in pairs, a tensor at a time: what two directions share counts once. The ranks are a power of two."""
    level = [operand.double() if operand.dtype is torch.float64 else operand.float() for operand in operands]
    while len(level) > 1:
        level = [_adasum_pair(one, other, sections) for one, other in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(operands[0].dtype)


def _adasum_pair(one: torch.Tensor, other: torch.Tensor, sections: Sequence[tuple[int, int]]) -> torch.Tensor:
    result = torch.empty_like(one)
    for start, stop in sections:
        a, b = one[start:stop], other[start:stop]
        dot, square_a, square_b = (float(torch.dot(x.double(), y.double())) for x, y in ((a, b), (a, a), (b, b)))
        keep_a = 1.0 if square_a == 0.0 else 1.0 - dot / (2.0 * square_a)
        keep_b = 1.0 if square_b == 0.0 else 1.0 - dot / (2.0 * square_b)
        result[start:stop] = keep_a * a + keep_b * b
    return result
