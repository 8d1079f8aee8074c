"""Whole models: their variables from one rank to all, and saved ones that are to be trained on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from holdfast.core.errors import ConfigError
from holdfast.horovod.tensorflow.compression import Compression, Compressor
from holdfast.horovod.tensorflow.functions import broadcast_variables
from holdfast.horovod.tensorflow.optimizer import DistributedOptimizer


def broadcast_global_variables(root_rank: int) -> None:
    """ConfigError: TensorFlow 2 keeps no list of all variables."""
    raise ConfigError(
        "there are no global variables in TensorFlow 2",
        hint="hvd.callbacks.BroadcastGlobalVariablesCallback(0), or hvd.broadcast_variables(model.variables, 0)",
    )


def broadcast_model(model: Any, root_rank: int, but: Iterable[Any] = ()) -> None:
    """The root's variables of the model and of its optimizer, on every rank."""
    left_out = {id(one) for one in but}
    optimizer = getattr(model, "optimizer", None)
    ours = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    broadcast_variables([one for one in ours if id(one) not in left_out], root_rank)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model whose optimizer, with the state that was saved, is distributed."""
    if legacy_opts:
        raise ConfigError("Keras 3 has no legacy optimizers", hint="leave legacy_opts out")
    objects = {one.__name__: one for one in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        model.jit_compile = False
    return model
