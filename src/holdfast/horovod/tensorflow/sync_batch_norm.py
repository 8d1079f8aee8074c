"""Batch normalisation over the batches of all ranks, as a layer of Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from holdfast.horovod.basics import Sum, is_initialized, size
from holdfast.horovod.tensorflow.reductions import allreduce


@keras.saving.register_keras_serializable(package="horovod")  # type: ignore[untyped-decorator, unused-ignore]
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc, unused-ignore]
    """As keras.layers.BatchNormalization, in training with the mean and the variance of all ranks' samples."""

    def __init__(self, fused: bool | None = False, **options: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization cannot be fused: leave `fused` out")
        super().__init__(**options)
        self.supports_jit = False  # XLA cannot call back into this process

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        if not is_initialized() or size() == 1:
            return mean, variance
        channels = tf.size(mean)
        samples = tf.cast(tf.size(inputs) // channels, mean.dtype)
        if mask is not None:
            samples *= tf.reduce_mean(tf.cast(mask, mean.dtype))
        sums = allreduce(tf.concat([mean * samples, [samples]], 0), op=Sum)
        total = tf.maximum(sums[-1], 1.0)
        everybodys = sums[:-1] / total
        spread = samples * (variance + tf.square(mean - everybodys))
        return everybodys, allreduce(spread, op=Sum) / total
