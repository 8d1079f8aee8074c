"""FSDP2's reduce-scatter in the order of the canonical tree, so that any number of ranks gives the bits of one process.

The tree over G leaves, a power of two, adds neighbours first: 0+1, 2+3, then these. So rank r exchanges with r^1, then
r^2, and so on, each time half of what is left, and keeps the part that is to be its own: recursive halving, which moves
no more bytes than any other way. Additions of floats commute, so both sides of a pair get the same sums.

A group of one rank casts its leaf to the parameters' dtype, weighs it, and only then it is added to others. So here a
leaf is cast and weighed before anything is added to it, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import ConfigError


class TreeScatter:
    """Given to one module of FSDP2 as its reduce-scatter. Sums only: Holdfast divides once, by the number of shards.

    `dtype`: of the module's own parameters, in which sums are. None: it has none that are trained.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._weight = 1.0
        self._summed = False

    def open(self, weight: float) -> None:
        """A shard begins, whose leaf on this rank counts for so much."""
        self._weight, self._summed = weight, False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """For what FSDP2 gives to be added, which it casts to where it puts it, and for the sums."""
        return torch.empty(*size, dtype=self._dtype or dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self._summed:
            raise ConfigError(
                "the gradients of a module that is sharded over a group are added up twice in one shard: in another "
                "order than with --ranks 1",
                hint="call such a module and backward once in a shard, or shard the module around it instead; before "
                "all calls of backward but the last, call model.set_requires_gradient_sync(False)",
            )
        self._summed = True
        ranks, rank = group.size(), group.rank()
        if self._weight != 1.0:
            input_tensor.mul_(self._weight)
        parts = input_tensor.view(ranks, -1)
        bit = 1
        while bit < ranks:
            # Of the parts that are left, those of ranks with this bit as mine stay here.
            pairs = parts.view(-1, 2, parts.shape[1])
            mine = int(bool(rank & bit))
            theirs = pairs[:, 1 - mine].contiguous()
            came = torch.empty_like(theirs)
            peer = dist.get_global_rank(group, rank ^ bit)
            sent = dist.isend(theirs, peer, group=group)
            received = dist.irecv(came, peer, group=group)
            assert sent is not None and received is not None
            received.wait()
            sent.wait()
            parts = came.add_(pairs[:, mine])
            bit *= 2
        output_tensor.copy_(parts.view(-1))
