"""Adding vectors in tree order and taking the mean: the only place where gradients of several shards meet.

Bits depend on the tree, never on who adds or in how many pieces: each element is added by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from holdfast.reduce.tree import Expression, Range, tree_over

CHUNK_ELEMENTS = 64 * 1024  # operands and result of a chunk stay in the cache

Operation = tuple[int, int, int]  # registers: left, right, where the sum goes


@lru_cache(maxsize=256)
def program(shards: int, nodes: tuple[Range, ...], *, partial: bool = False) -> tuple[tuple[Operation, ...], int]:
    """The additions that sum `nodes`, as a list; and how many temporary registers they need. `partial`: see Tree.

    Registers 0..len(nodes)-1 are the nodes; then come temporaries. The last operation writes the sum.
    """
    operations: list[Operation] = []
    free: list[int] = []
    count = len(nodes)
    highest = count

    def emit(expression: Expression) -> int:
        nonlocal highest
        if isinstance(expression, int):
            return expression
        left, right = emit(expression[0]), emit(expression[1])
        free.extend(register for register in (left, right) if register >= count)
        if free:
            target = free.pop()
        else:
            target = highest
            highest += 1
        operations.append((left, right, target))
        return target

    emit(tree_over(shards).expression(nodes, partial=partial))
    return tuple(operations), highest - count


def mean_into(
    out: torch.Tensor,
    operands: Sequence[torch.Tensor],
    nodes: tuple[Range, ...],
    shards: int,
    start: int,
    stop: int,
    *,
    leaves: int = 1,
) -> None:
    """out[start:stop] = the canonical sum of the operands there, divided by the number of shards that are in it. Each
    of them counts for `leaves`.

    That it is all of them is checked by whoever must have them all. `out` may be one of the operands: an element is
    written after it was read for the last time.
    """
    count = sum(high - low for low, high in nodes)
    _add_into(out, operands, nodes, shards, count * leaves, start, stop, partial=count < shards)


def sum_into(out: torch.Tensor, operands: Sequence[torch.Tensor], nodes: Sequence[Range], node: Range) -> None:
    """out = the canonical sum of one node of the tree, from nodes that together are exactly it.

    Where a range is cut depends on its length alone, so below a node the tree is the one over as many shards.
    """
    start, stop = node
    moved = tuple((low - start, high - start) for low, high in nodes)
    _add_into(out, operands, moved, stop - start, 1, 0, out.numel())


def _add_into(
    out: torch.Tensor,
    operands: Sequence[torch.Tensor],
    nodes: tuple[Range, ...],
    shards: int,
    divisor: int,
    start: int,
    stop: int,
    *,
    partial: bool = False,
) -> None:
    operations, temporaries = program(shards, nodes, partial=partial)
    count = len(nodes)
    chunk = min(CHUNK_ELEMENTS, max(1, stop - start))
    spare = [torch.empty(chunk, dtype=out.dtype) for _ in range(temporaries)]
    for low in range(start, stop, chunk):
        high = min(low + chunk, stop)
        whole = low == 0 and high == out.numel()
        target = out if whole else out[low:high]
        registers = list(operands) if whole else [operand[low:high] for operand in operands]
        registers += [temporary[: high - low] for temporary in spare]
        if not operations:
            divide(registers[0], divisor, target)
            continue
        for left, right, to in operations[:-1]:
            torch.add(registers[left], registers[right], out=registers[to])
        left, right, _ = operations[-1]
        torch.add(registers[left], registers[right], out=target)
        divide(target, divisor, target)
    assert count == len(operands)


def divide(source: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    """Integers stay the sum: whoever put them there knows what they are parts of (modes/buffers.py)."""
    if divisor != 1 and (source.dtype.is_floating_point or source.dtype.is_complex):
        torch.div(source, divisor, out=out)
    elif out.data_ptr() != source.data_ptr():
        out.copy_(source)
