"""Two questions that Keras asks itself about a model, answered otherwise where the optimizer is distributed.

Whether XLA can compile its step: no, since XLA cannot call back into this process (`jit_compile="auto"`, the default,
comes out as False). And, where the loss is scaled, whether gradients are finite: only if they are on every rank, so
that all ranks make the step or none does.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from holdfast.horovod.basics import Min
from holdfast.horovod.tensorflow.reductions import allreduce

_MARK = "_holdfast_asks_the_optimizer"


def install_hooks() -> None:
    """From now on. Twice is no error."""
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.trainers import trainer

    if getattr(trainer.model_supports_jit, _MARK, False):
        return
    supports, is_finite = trainer.model_supports_jit, LossScaleOptimizer.check_finite

    @functools.wraps(supports)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return _reducing(getattr(optimizer, "inner_optimizer", optimizer)) is None and bool(supports(model))

    @functools.wraps(is_finite)
    def check_finite(self: Any, grads: Any) -> Any:
        mine, reducing = is_finite(self, grads), _reducing(self.inner_optimizer)
        if reducing is None or not reducing.process_set.included():
            return mine
        return tf.cast(allreduce(tf.cast(mine, tf.int32), op=Min, process_set=reducing.process_set), tf.bool)

    setattr(model_supports_jit, _MARK, True)
    trainer.model_supports_jit = model_supports_jit
    LossScaleOptimizer.check_finite = check_finite


def _reducing(optimizer: Any) -> Any:
    return getattr(optimizer, "holdfast_reducing", None)
