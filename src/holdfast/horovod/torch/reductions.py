"""allreduce, grouped_allreduce, reducescatter, grouped_reducescatter and sparse_allreduce_async. Horovod's names.

Gradients flow through those that do not work in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.horovod.basics import Adasum, Average, Sum
from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.words import Kind, Op
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.torch.compression import Compression, Compressor
from holdfast.horovod.torch.gathering import allgather, allgather_async, grouped_allgather
from holdfast.horovod.torch.handles import ask, submit, synchronize, where_they_came_from

Tensor = torch.Tensor
Compressing = type[Compressor]


def chosen_op(op: Op | None, average: bool | None) -> Op:
    """Average, unless one of the two says otherwise."""
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both; average is the old one")
        warnings.warn(
            "average=True or False is old: give op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    return Average if op is None else Op(op)


def _check(tensors: Sequence[Tensor], op: Op, process_set: ProcessSet) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a torch.Tensor is needed, not {type(tensor).__name__}")
        if tensor.is_sparse:
            raise ValueError("a sparse tensor is for sparse_allreduce_async")
    if op is Adasum:
        size = process_set.size() or 1
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum is for all ranks, not for a process set")
        if size & (size - 1):
            raise NotImplementedError(f"Adasum needs a power of two ranks, and there are {size}")


def _scales(prescale: float, postscale: float) -> dict[str, float]:
    return {"prescale": float(prescale), "postscale": float(postscale)}


def _reduce(
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    op: Op,
    scales: dict[str, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
    soon: bool = False,
) -> int:
    _check(tensors, op, process_set)
    request = ask(Kind.ALLREDUCE, tensors, name, process_set, op=op, **scales)
    targets = [out.detach() for out in outputs]  # a parameter, too, is written without a word to autograd

    def finish(handle: Handle) -> Any:
        for target, result in zip(targets, handle.results, strict=True):
            if target is not result:
                target.copy_(result)
        return list(outputs) if grouped else outputs[0]

    return submit(request, tensors, finish, targets, soon=soon)


def _empty(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a torch.Tensor is needed, not {type(tensor).__name__}")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# ---- allreduce


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    scales = _scales(prescale_factor, postscale_factor)
    return _reduce([tensor], [_empty(tensor)], name, chosen_op(op, average), scales, process_set, grouped=False)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    scales = _scales(prescale_factor, postscale_factor)
    return _reduce([tensor], [tensor], name, chosen_op(op, average), scales, process_set, grouped=False)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    scales = _scales(prescale_factor, postscale_factor)
    chosen = chosen_op(op, average)
    done: Tensor = synchronize(_reduce([tensor], [tensor], name, chosen, scales, process_set, grouped=False, soon=True))
    return done


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    smaller, about = compression.compress(tensor)
    scales = _scales(prescale_factor, postscale_factor)
    (reduced,) = _Allreduce.apply(name, chosen_op(op, average), scales, process_set, False, smaller)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, about)


class _Allreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of their gradients, scaled alike."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: Op,
        scales: dict[str, float],
        process_set: ProcessSet,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.about = (op, scales, process_set, grouped)
        outputs = [_empty(tensor) for tensor in tensors]
        synchronize(_reduce(tensors, outputs, name, op, scales, process_set, grouped=grouped, soon=True))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op, scales, process_set, grouped = ctx.about
        whole = [gradient.contiguous() for gradient in gradients]
        outputs = [_empty(gradient) for gradient in whole]
        synchronize(_reduce(whole, outputs, None, op, scales, process_set, grouped=grouped, soon=True))
        return (None, None, None, None, None, *outputs)


# ---- grouped_allreduce


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    scales, outputs = _scales(prescale_factor, postscale_factor), [_empty(tensor) for tensor in tensors]
    return _reduce(tensors, outputs, _grouped(name), chosen_op(op, average), scales, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    scales = _scales(prescale_factor, postscale_factor)
    return _reduce(tensors, tensors, _grouped(name), chosen_op(op, average), scales, process_set, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    scales, chosen = _scales(prescale_factor, postscale_factor), chosen_op(op, average)
    number = _reduce(tensors, tensors, _grouped(name), chosen, scales, process_set, grouped=True, soon=True)
    done: list[Tensor] = synchronize(number)
    return done


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    scales, chosen = _scales(prescale_factor, postscale_factor), chosen_op(op, average)
    reduced = _Allreduce.apply(_grouped(name), chosen, scales, process_set, True, *(one for one, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(one, about) for one, (_, about) in zip(reduced, packed, strict=True)]


def _grouped(name: str | None) -> str | None:
    """A group is one collective, and its name is not that of a single tensor."""
    return None if name is None else f"group.{name}"


# ---- reducescatter


def _scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: Op,
    scales: dict[str, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
    soon: bool = False,
) -> int:
    _check(tensors, Average, process_set)
    request = ask(Kind.REDUCESCATTER, tensors, name, process_set, op=Op(op), **scales)
    return submit(request, tensors, where_they_came_from(tensors, grouped=grouped), soon=soon)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    return _scatter([tensor], name, op, _scales(prescale_factor, postscale_factor), process_set, grouped=False)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    return _scatter(tensors, _grouped(name), op, _scales(prescale_factor, postscale_factor), process_set, grouped=True)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    smaller, about = compression.compress(tensor)
    scales = _scales(prescale_factor, postscale_factor)
    (reduced,) = _Reducescatter.apply(name, op, scales, process_set, False, smaller)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, about)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressing = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    packed = [compression.compress(tensor) for tensor in tensors]
    scales = _scales(prescale_factor, postscale_factor)
    reduced = _Reducescatter.apply(_grouped(name), op, scales, process_set, True, *(one for one, _ in packed))  # type: ignore[no-untyped-call]
    return [compression.decompress(one, about) for one, (_, about) in zip(reduced, packed, strict=True)]


class _Reducescatter(torch.autograd.Function):
    """Everybody's gradient of its rows, gathered; as Horovod has it, times the ranks where they were summed."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: Op,
        scales: dict[str, float],
        process_set: ProcessSet,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.about = (op, scales, process_set, grouped)
        done = synchronize(_scatter(tensors, name, op, scales, process_set, grouped=True, soon=True))
        return tuple(done)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        op, scales, process_set, grouped = ctx.about
        scale = scales["prescale"] * scales["postscale"]
        found = reducescatter_gradients(gradients, op, scale, process_set, grouped=grouped)
        return (None, None, None, None, None, *found)


def reducescatter_gradients(
    gradients: Sequence[Tensor], op: Op, scale: float, process_set: ProcessSet, *, grouped: bool
) -> list[Tensor]:
    """Everybody's gradient of its rows. `scale`: by how much the sum was scaled, before and after."""
    factor = scale * ((process_set.size() or 1) if op == Sum else 1)
    scaled = [gradient.contiguous() * factor for gradient in gradients]
    if grouped:
        return grouped_allgather(scaled, process_set=process_set)
    return [allgather(scaled[0], process_set=process_set)]


# ---- sparse


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Rows of all ranks, gathered; what is returned is called for the result."""
    whole = tensor.coalesce() if not tensor.is_coalesced() else tensor
    indices = allgather_async(whole.indices().t().contiguous(), f"{name}.indices" if name else None, process_set)
    values = allgather_async(whole.values().contiguous(), f"{name}.values" if name else None, process_set)

    def finish() -> Tensor:
        found, rows = synchronize(values), synchronize(indices).t()
        if op == Average:
            found = found / (process_set.size() or 1)
        return torch.sparse_coo_tensor(rows, found, tensor.size())

    return finish
