"""Collectives of plain values: numbers, lists and arrays, as callbacks have them. What comes back is numpy's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from holdfast.horovod.basics import Average, Sum
from holdfast.horovod.exchange.words import Op
from holdfast.horovod.tensorflow import mpi_ops
from holdfast.horovod.tensorflow.compression import Compression, Compressor


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """`op` beats `average`."""
    chosen = op if op is not None else (Average if average else Sum)
    found = mpi_ops.allreduce(
        tf.convert_to_tensor(value),
        name=name,
        op=chosen,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )
    return found.numpy()


def allgather(value: Any, name: str | None = None) -> Any:
    return mpi_ops.allgather(tf.convert_to_tensor(value), name=name).numpy()


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    return mpi_ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name).numpy()


def reducescatter(value: Any, name: str | None = None, op: Op = Average) -> Any:
    return mpi_ops.reducescatter(tf.convert_to_tensor(value), name=name, op=op).numpy()
