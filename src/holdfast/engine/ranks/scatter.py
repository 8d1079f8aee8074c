"""FSDP2's reduce-scatter in the order of the canonical tree, so that any number of ranks gives the bits of one process.

The tree over G leaves, a power of two, adds neighbours first: 0+1, 2+3, then these. So rank r exchanges with r^1, then
r^2, and so on, each time half of what is left, and keeps the part that is to be its own: recursive halving, which moves
no more bytes than any other way. Additions of floats commute, so both sides of a pair get the same sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class TreeScatter:
    """Given to FSDP2 as its reduce-scatter. Sums only: Holdfast divides once, by the number of shards."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        ranks, rank = group.size(), group.rank()
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
