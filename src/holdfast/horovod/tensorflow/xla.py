"""Keras compiles a training step with XLA where it can, and XLA cannot call back into this process.

`jit_compile="auto"`, Keras's default, must come out as False for a model whose optimizer is distributed. Keras asks one
function whether a model can be compiled; that one is told.
"""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_holdfast_asks_the_optimizer"


def switch_off_xla() -> None:
    """For models with a distributed optimizer, from now on. Twice is no error."""
    from keras.src.trainers import trainer

    supports = trainer.model_supports_jit
    if getattr(supports, _MARK, False):
        return

    @functools.wraps(supports)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return getattr(optimizer, "holdfast_reducing", None) is None and bool(supports(model))

    setattr(model_supports_jit, _MARK, True)
    trainer.model_supports_jit = model_supports_jit
