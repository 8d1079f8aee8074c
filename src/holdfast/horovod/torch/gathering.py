"""allgather, grouped_allgather, broadcast and alltoall. Horovod's names. Gradients flow through those that return a
tensor and do not work in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.horovod.basics import rank
from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.words import Kind
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.torch.handles import ask, refuse, submit, synchronize, where_they_came_from

Tensor = torch.Tensor


# ---- allgather


def _gather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool, soon: bool = False
) -> int:
    request = ask(Kind.ALLGATHER, tensors, name, process_set)
    return submit(request, tensors, where_they_came_from(tensors, grouped=grouped), soon=soon)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    return _gather([tensor], name, process_set, grouped=False)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    return _gather(tensors, None if name is None else f"group.{name}", process_set, grouped=True)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    (gathered,) = _Allgather.apply(name, process_set, tensor)  # type: ignore[no-untyped-call]
    found: Tensor = gathered
    return found


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    return list(_Allgather.apply(None if name is None else f"group.{name}", process_set, *tensors))  # type: ignore[no-untyped-call]


class _Allgather(torch.autograd.Function):
    """The gradient: the mean over ranks of that of my rows, as Horovod has it."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return tuple(synchronize(_gather(tensors, name, process_set, grouped=True, soon=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, *allgather_gradients(gradients, ctx.rows, ctx.process_set))


def allgather_gradients(gradients: Sequence[Tensor], counts: Sequence[int], process_set: ProcessSet) -> list[Tensor]:
    """The mean over ranks of the gradients, cut to the rows that this rank brought."""
    from holdfast.horovod.torch.reductions import grouped_allreduce

    mean = grouped_allreduce([gradient.contiguous() for gradient in gradients], process_set=process_set)
    rows = torch.tensor([list(counts)], dtype=torch.int64)
    everybodys = synchronize(_gather([rows], None, process_set, grouped=False, soon=True))
    before = everybodys[: process_set.rank() or 0].sum(0)
    return [one.narrow(0, int(start), count) for one, start, count in zip(mean, before, counts, strict=True)]


# ---- broadcast


def _send(
    tensor: Tensor, out: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, soon: bool = False
) -> int:
    request = ask(Kind.BROADCAST, [tensor], name, process_set, root=max(0, int(root_rank)))
    members = process_set.ranks or range(1)
    if root_rank not in members:
        refuse(request, f"root_rank is {root_rank}, which is no rank of {list(members)}")

    def finish(handle: Handle) -> Tensor:
        if handle.results[0] is not out:
            out.detach().copy_(handle.results[0])
        return out

    return submit(request, [tensor], finish, [out], soon=soon)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return _send(tensor, out, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    return _send(tensor, tensor.detach(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    synchronize(_send(tensor, tensor.detach(), root_rank, name, process_set, soon=True))
    return tensor


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    found: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return found


class _Broadcast(torch.autograd.Function):
    """The gradient: the mean over ranks, at the root; zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.about = (root_rank, process_set)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        found: Tensor = synchronize(_send(tensor, out, root_rank, name, process_set, soon=True))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        from holdfast.horovod.torch.reductions import allreduce

        root_rank, process_set = ctx.about
        mean = allreduce(gradient.contiguous(), process_set=process_set)
        return mean if rank() == root_rank else torch.zeros_like(mean), None, None, None


# ---- alltoall


def _exchange(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    soon: bool = False,
) -> int:
    size = process_set.size() or 1
    rows = tensor.shape[0] if tensor.dim() else 0
    plain = ask(Kind.ALLTOALL, [tensor], name, process_set)
    if splits is None:
        given = even_splits(tensor, name, process_set)
    else:
        if isinstance(splits, Tensor) and (splits.dtype.is_floating_point or splits.dtype.is_complex):
            refuse(plain, f"splits are whole numbers, not {splits.dtype}")
        given = [int(one) for one in (splits.tolist() if isinstance(splits, Tensor) else splits)]
        if len(given) != size or min(given, default=0) < 0 or sum(given) != rows:
            refuse(plain, f"splits {given} must be {size} whole numbers that are {rows} together")
    request = ask(Kind.ALLTOALL, [tensor], name, process_set, splits=tuple(given))
    dtype = splits.dtype if isinstance(splits, Tensor) else torch.int32
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def finish(handle: Handle) -> tuple[Tensor, Tensor]:
        received = torch.tensor(handle.splits, dtype=dtype, device=device)
        return handle.results[0].to(tensor.device), received

    return submit(request, [tensor], finish, soon=soon)


def even_splits(tensor: Tensor, name: str | None, process_set: ProcessSet) -> list[int]:
    """The same number of rows for each rank. ValueError if there is none, and the others are told."""
    size = process_set.size() or 1
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % size:
        plain = ask(Kind.ALLTOALL, [tensor], name, process_set)
        refuse(plain, f"alltoall of {rows} rows to {size} ranks: give splits, or a multiple of {size} rows")
    return [rows // size] * size


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Its result is a pair: what came, and how many rows of it from each rank."""
    return _exchange(tensor, splits, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """What the ranks sent to this one; with `splits`, also how many rows came from each."""
    found, received = _Alltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return found if splits is None else (found, received)


class _Alltoall(torch.autograd.Function):
    """The gradient goes the same way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        found, received = synchronize(_exchange(tensor, splits, name, process_set, soon=True))
        ctx.about = (received, process_set)
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _received: Tensor) -> tuple[Any, ...]:
        received, process_set = ctx.about
        back, _ = synchronize(_exchange(gradient.contiguous(), received, None, process_set, soon=True))
        return back, None, None, None
