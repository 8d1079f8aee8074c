"""Variables whose gradients stay on their rank: those of layers that each rank trains by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from holdfast.horovod.process_sets import ProcessSet
from holdfast.horovod.tensorflow.functions import plain_variable
from holdfast.horovod.tensorflow.mpi_ops import size_op
from holdfast.horovod.tensorflow.reductions import is_sparse

Tensor = Any


class LocalVariables:
    """By their identity. `scale`: their gradients are divided by the number of ranks, as the others' are."""

    def __init__(self, *, scale: bool) -> None:
        self.scale = scale
        self._known: dict[int, Any] = {}  # keeps them, so that an identity stays theirs

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, variable: Any) -> None:
        plain = plain_variable(variable)
        self._known[id(plain)] = plain

    def among(self, variables: Sequence[Any]) -> list[bool]:
        return [id(plain_variable(one)) in self._known for one in variables]

    def scaled(self, gradient: Tensor, process_set: ProcessSet) -> Tensor:
        if gradient is None or not self.scale:
            return gradient
        number = process_set.process_set_id
        assert number is not None
        size = size_op(number)  # looked up when the graph runs: the world may form anew
        if is_sparse(gradient):
            values = gradient.values / tf.cast(size, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(size, gradient.dtype)


def variables_of(local_layers: Any) -> Iterable[Any]:
    """The trainable variables of a layer, or of some. ValueError for anything else."""
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers)
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers are layers of Keras")
    return [variable for layer in layers for variable in layer.trainable_weights]
