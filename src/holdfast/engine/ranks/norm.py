"""holdfast.clip_grad_norm_: as torch's, with the same bits however many ranks the parameters are sharded over.

torch's norm over sharded tensors adds up the squares of each part by itself, so its last bits depend on how many parts
there are. Here squares are added in float64, first along each row of a gradient, which is on one rank, and then over
the rows: always the first half to the second. All of that is elementwise, so the bits depend on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.state.local import is_sharded, local

CHUNK_ELEMENTS = 1 << 18  # of a gradient at once, so that its squares stay in the cache
SMALLEST = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients so that their norm, as if they were one vector, is at most `max_norm`. The norm before that.

    Call it on every rank of a group.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [one.grad for one in given if one.grad is not None]
    with torch.no_grad():
        norm = math.sqrt(sum(_sum_of_rows(rows) for rows in _rows_of_all(grads)))
        if error_if_nonfinite and not math.isfinite(norm):
            raise ConfigError(f"the norm of the gradients is {norm}", hint="leave error_if_nonfinite out to go on")
        scale = max_norm / (norm + SMALLEST)
        if not scale >= 1.0:  # also where it is no number
            for grad in grads:
                local(grad).mul_(scale)
    return torch.tensor(norm)


def _rows_of_all(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each gradient the sums of squares of its rows, whichever rank has them. One collective for all of them."""
    mine = [_squares(local(grad)) for grad in grads]
    sharded = [number for number, grad in enumerate(grads) if is_sharded(grad)]
    if not sharded:
        return mine
    import torch.distributed as dist

    first: Any = grads[sharded[0]]
    group = first.device_mesh.get_group()
    ranks = group.size()
    sizes = [-(-grads[number].shape[0] // ranks) for number in sharded]  # rows on a rank, fewer on the last ones
    packed = torch.zeros(sum(sizes), dtype=torch.float64)
    for part, number in zip(torch.split(packed, sizes), sharded, strict=True):
        part[: mine[number].numel()] = mine[number]
    everybody = torch.empty(ranks * packed.numel(), dtype=torch.float64)
    dist.all_gather_into_tensor(everybody, packed, group=group)
    parts = torch.split(everybody.view(ranks, -1), sizes, dim=1)
    for part, number in zip(parts, sharded, strict=True):
        mine[number] = part.reshape(-1)[: grads[number].shape[0]]
    return mine


def _squares(grad: torch.Tensor) -> torch.Tensor:
    if not grad.numel():
        return torch.zeros(grad.shape[0] if grad.dim() else 1, dtype=torch.float64)
    rows = grad.detach().reshape(grad.shape[0], -1) if grad.dim() else grad.detach().reshape(1, 1)
    many = max(1, CHUNK_ELEMENTS // rows.shape[1])
    sums = torch.empty(rows.shape[0], dtype=torch.float64)
    for start in range(0, rows.shape[0], many):
        part = rows[start : start + many].double()
        sums[start : start + many] = _halved(part * part)
    return sums


def _sum_of_rows(rows: torch.Tensor) -> float:
    return _halved(rows.view(1, -1)).item()


def _halved(table: torch.Tensor) -> torch.Tensor:
    """The sum of each row: the first half is added to the second until one number is left."""
    while (width := table.shape[1]) > 1:
        half = (width + 1) // 2
        rest = width - half
        folded = table[:, :half].clone()
        folded[:, :rest] += table[:, half:]
        table = folded
    return table[:, 0]
