"""allgather, grouped_allgather, broadcast and alltoall of TensorFlow's tensors. Horovod's names.

They work eagerly and inside a `tf.function`, and gradients flow through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from holdfast.horovod.basics import Average, rank
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.tensorflow.bridge import on_host, rows_unknown, spec_of, unconverted
from holdfast.horovod.tensorflow.without_effect import check
from holdfast.horovod.torch import gathering as host
from holdfast.horovod.torch import reductions

Tensor = Any


# ---- allgather


def _gather(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, *, grouped: bool) -> list[Tensor]:
    """The gradient: the mean over ranks of that of my rows, as Horovod has it."""

    def gather(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        if grouped:
            return host.grouped_allgather(brought, name=name, process_set=process_set)
        return [host.allgather(brought[0], name=name, process_set=process_set)]

    def back(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        *gradients, rows = brought
        return host.allgather_gradients(gradients, [int(one) for one in rows], process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def gathered(*inputs: Tensor) -> Any:
        def backward(*upstream: Tensor) -> list[Tensor | None]:
            wanted = [index for index, one in enumerate(inputs) if one.dtype.is_floating or one.dtype.is_complex]
            dense = [tf.convert_to_tensor(upstream[index]) for index in wanted]
            rows = tf.stack([tf.shape(inputs[index], out_type=tf.int64)[0] for index in wanted])
            found = on_host(back, [*dense, rows], [spec_of(inputs[index]) for index in wanted])
            of = dict(zip(wanted, found, strict=True))
            return [of.get(index) for index in range(len(inputs))]

        return on_host(gather, inputs, [rows_unknown(one) for one in inputs]), backward

    return list(gathered(*tensors)) if tensors else []


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set, **without_effect: Any
) -> Tensor:
    check(without_effect)
    return _gather([tf.convert_to_tensor(tensor)], name, process_set, grouped=False)[0]


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> list[Tensor]:
    check(without_effect)
    return _gather([tf.convert_to_tensor(one) for one in tensors], name, process_set, grouped=True)


# ---- broadcast


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> Tensor:
    """The gradient: the mean over ranks, at the root; zero elsewhere."""
    check(without_effect)

    def send(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        return [host.broadcast(brought[0], root_rank, name, process_set)]

    def back(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        mean = reductions.allreduce(brought[0], op=Average, process_set=process_set)
        return [mean if rank() == root_rank else torch.zeros_like(mean)]

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def sent(one: Tensor) -> Any:
        def backward(upstream: Tensor) -> Tensor:
            return on_host(back, [tf.convert_to_tensor(upstream)], [spec_of(one)])[0]

        return on_host(send, [one], [spec_of(one)])[0], backward

    return sent(tf.convert_to_tensor(tensor))


# ---- alltoall


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **without_effect: Any,
) -> Any:
    """What the ranks sent to this one; with `splits`, also how many rows came from each."""
    check(without_effect)
    shares = [] if splits is None else [_whole(splits)]

    def around(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        found, received = host.alltoall(brought[0], _splits(brought), name, process_set)
        return [found, received.to(torch.int32)]

    def back(brought: list[torch.Tensor]) -> list[torch.Tensor]:
        return [host.alltoall(brought[0], brought[1], None, process_set)[0]]

    def _splits(brought: list[torch.Tensor]) -> torch.Tensor | list[int]:
        return brought[1] if len(brought) > 1 else host.even_splits(brought[0], name, process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def exchanged(one: Tensor) -> Any:
        specs = [rows_unknown(one), (tf.int32, tf.TensorShape([None]))]
        found, received = on_host(around, [one, *shares], specs)

        def backward(upstream: Tensor, _received: Tensor = None) -> Tensor:
            return on_host(back, [tf.convert_to_tensor(upstream), received], [spec_of(one)])[0]

        return (found, received), backward

    found, received = exchanged(tf.convert_to_tensor(tensor))
    return found if splits is None else (found, received)


def _whole(splits: Tensor | Sequence[int]) -> Tensor:
    return splits if tf.is_tensor(splits) else tf.constant(np.asarray(splits, np.int64 if len(splits) == 0 else None))
