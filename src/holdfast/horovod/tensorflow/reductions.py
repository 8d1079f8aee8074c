"""allreduce, grouped_allreduce, reducescatter and grouped_reducescatter of TensorFlow's tensors. Horovod's names.

They work eagerly and inside a `tf.function`, and gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch

from holdfast.horovod.basics import Adasum, Average, Sum
from holdfast.horovod.exchange.words import Op
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.tensorflow.bridge import on_host, rows_unknown, spec_of, unconverted
from holdfast.horovod.tensorflow.compression import Compression, Compressor
from holdfast.horovod.tensorflow.gathering import grouped_allgather
from holdfast.horovod.tensorflow.without_effect import check
from holdfast.horovod.torch import reductions as host

Tensor = Any
Compressing = type[Compressor]
Scales = dict[str, float]


def _scales(prescale: float, postscale: float) -> Scales:
    return {"prescale_factor": float(prescale), "postscale_factor": float(postscale)}


def is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


# ---- allreduce


def _reduce(
    tensors: Sequence[Tensor], name: str | None, op: Op, scales: Scales, process_set: ProcessSet, *, grouped: bool
) -> list[Tensor]:
    """The gradient of a sum over ranks is the sum of their gradients, scaled alike."""

    def reduce(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        options: dict[str, Any] = {"name": name, "op": op, "process_set": process_set, **scales}
        if grouped:
            return host.grouped_allreduce(brought, **options)
        return [host.allreduce(brought[0], **options)]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def reduced(*inputs: Tensor) -> Any:
        def backward(*upstream: Tensor) -> list[Tensor]:
            dense = [tf.convert_to_tensor(one) for one in upstream]
            return _reduce(dense, None, op, scales, process_set, grouped=grouped)

        return on_host(reduce, inputs, [spec_of(one) for one in inputs]), backward

    return list(reduced(*tensors)) if tensors else []


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> Tensor:
    """A tensor, a variable or tf.IndexedSlices, whose rows are gathered."""
    check(without_effect)
    chosen = host.chosen_op(op, average)
    if is_sparse(tensor):
        return sparse_allreduce(tensor, chosen, name, process_set)
    smaller, about = compression.compress(tf.convert_to_tensor(tensor))
    scales = _scales(prescale_factor, postscale_factor)
    (reduced,) = _reduce([smaller], name, chosen, scales, process_set, grouped=False)
    return compression.decompress(reduced, about)


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    compression: Compressing = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    **without_effect: Any,
) -> list[Tensor]:
    """One collective of all tensors that are dense; those that are not are gathered, each by itself."""
    check(without_effect)
    chosen, scales = host.chosen_op(op, average), _scales(prescale_factor, postscale_factor)
    dense = [index for index, one in enumerate(tensors) if not is_sparse(one)]
    packed = [compression.compress(tf.convert_to_tensor(tensors[index])) for index in dense]
    reduced = _reduce([one for one, _ in packed], name, chosen, scales, process_set, grouped=True)
    found: dict[int, Tensor] = {
        index: compression.decompress(one, about) for index, one, (_, about) in zip(dense, reduced, packed, strict=True)
    }
    for index, one in enumerate(tensors):
        if is_sparse(one):
            found[index] = sparse_allreduce(one, chosen, f"{name}.{index}" if name else None, process_set)
    return [found[index] for index in range(len(tensors))]


def sparse_allreduce(slices: Any, op: Op, name: str | None, process_set: ProcessSet) -> Any:
    """The rows of all ranks, with their indices; an index may come several times."""
    if op == Adasum:
        raise NotImplementedError("Adasum is for dense tensors: say sparse_as_dense=True")
    if op not in (Sum, Average):
        raise NotImplementedError(f"tf.IndexedSlices can be summed and averaged, not {Op(op).word}")
    values, indices = grouped_allgather([slices.values, slices.indices], name=name, process_set=process_set)
    if op == Average:
        values = _divided(values, process_set)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _divided(values: Tensor, process_set: ProcessSet) -> Tensor:
    """By the number of ranks that there are when it runs."""

    def divide(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.div(brought[0], process_set.size() or 1).to(brought[0].dtype)]

    return on_host(divide, [values], [spec_of(values)])[0]


# ---- reducescatter


def _scatter(
    tensors: Sequence[Tensor], name: str | None, op: Op, scales: Scales, process_set: ProcessSet, *, grouped: bool
) -> list[Tensor]:
    """The gradient: everybody's of its rows, gathered; as Horovod has it, times the ranks where they were summed."""

    def scatter(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        options: dict[str, Any] = {"name": name, "op": op, "process_set": process_set, **scales}
        if grouped:
            return host.grouped_reducescatter(brought, **options)
        return [host.reducescatter(brought[0], **options)]

    def gather(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        scale = scales["prescale_factor"] * scales["postscale_factor"]
        return host.reducescatter_gradients(brought, op, scale, process_set, grouped=grouped)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def scattered(*inputs: Tensor) -> Any:
        def backward(*upstream: Tensor) -> list[Tensor]:
            dense = [tf.convert_to_tensor(one) for one in upstream]
            return on_host(gather, dense, [spec_of(one) for one in inputs])

        return on_host(scatter, inputs, [rows_unknown(one) for one in inputs]), backward

    return list(scattered(*tensors)) if tensors else []


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def reducescatter(
    tensor: Tensor,
    compression: Compressing = Compression.none,
    op: Op = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **without_effect: Any,
) -> Tensor:
    check(without_effect)
    smaller, about = compression.compress(tf.convert_to_tensor(tensor))
    scales = _scales(prescale_factor, postscale_factor)
    (reduced,) = _scatter([smaller], name, op, scales, process_set, grouped=False)
    return compression.decompress(reduced, about)


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    compression: Compressing = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    **without_effect: Any,
) -> list[Tensor]:
    check(without_effect)
    packed = [compression.compress(tf.convert_to_tensor(one)) for one in tensors]
    scales = _scales(prescale_factor, postscale_factor)
    reduced = _scatter([one for one, _ in packed], name, op, scales, process_set, grouped=True)
    return [compression.decompress(one, about) for one, (_, about) in zip(reduced, packed, strict=True)]
