"""Tensors of TensorFlow in an exchange: eagerly at once, and in a graph when the graph comes to them.

A collective is a function of torch tensors, which share memory with numpy's. In a `tf.function` it becomes a stateful
numpy_function: such operations run in the order in which they were written, the same on every rank, and what a rank is
(its number, the size of the world) is looked up when they run, so that a graph outlives the world that it was made in.

TensorFlow makes an error of its own of what a function raises in a graph; `own_errors` gives the first one back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from holdfast.horovod.common.exceptions import HorovodInternalError

Tensor = Any  # tf.Tensor; TensorFlow has no types
OnHost = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
Spec = tuple[Any, Any]  # dtype and static shape
unconverted = tf.autograph.experimental.do_not_convert
_raised: deque[HorovodInternalError] = deque(maxlen=16)


def spec_of(tensor: Tensor) -> Spec:
    return tensor.dtype, tensor.shape


def rows_unknown(tensor: Tensor) -> Spec:
    """The spec of a result that has the same rows as this tensor, and another number of them."""
    shape = tensor.shape
    return tensor.dtype, tf.TensorShape([None, *shape[1:]]) if shape.rank else tf.TensorShape(None)


def to_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """The same memory. numpy has no bfloat16 of its own, and torch does not know that of others."""
    if array.dtype == tf.bfloat16.as_numpy_dtype:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.type is np.str_ or array.dtype.type is np.object_ or array.dtype.type is np.bytes_:
        raise ValueError("a tensor of strings cannot be exchanged: use broadcast_object or allgather_object")
    return torch.from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().contiguous()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return plain.numpy()


def on_host(function: OnHost, tensors: Sequence[Tensor], specs: Sequence[Spec]) -> list[Tensor]:
    """What the function makes of these tensors; `specs` says what comes of it, for a graph."""
    if tf.executing_eagerly():
        found = function([to_torch(np.asarray(one.numpy())) for one in tensors])
        return [tf.convert_to_tensor(to_numpy(one)) for one in found]

    def later(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        try:
            return [to_numpy(one) for one in function([to_torch(np.asarray(array)) for array in arrays])]
        except HorovodInternalError as error:
            _raised.append(error)
            raise

    results = tf.numpy_function(later, list(tensors), [dtype for dtype, _ in specs])
    for result, (_, shape) in zip(results, specs, strict=True):
        result.set_shape(shape)
    return list(results)


@contextmanager
def own_errors() -> Iterator[None]:
    """Whatever a collective raised in a graph comes out as it was raised."""
    try:
        yield
    except tf.errors.OpError as error:
        for first in reversed(_raised):
            if str(first) in error.message:
                raise first from error
        raise
