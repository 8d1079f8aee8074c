"""Which variables a model has: those that are trained, those that are not, and the states of its generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.integrations.variables.mirror import Variables

SEED = "seed_generator_state"  # as Keras calls the variable of a keras.random.SeedGenerator


def variables_of(model: Any) -> Variables:
    """Of a keras.Model that is built, a tf.Module, or a list of variables."""
    if isinstance(model, (list, tuple)):
        trained = [one for one in model if one.trainable]
        return Variables(trainable=trained, others=[one for one in model if not one.trainable])
    if not hasattr(model, "trainable_variables"):
        raise ConfigError(
            f"the model is {a_kind(model)} without trainable_variables",
            hint="give a keras.Model, a tf.Module, or a list of tf.Variables",
        )
    if getattr(model, "built", True) is False:
        raise ConfigError(
            "the model has no variables yet", hint="call it once with a batch, or model.build(...), before join"
        )
    trained = list(model.trainable_variables)
    if not trained:
        raise ConfigError("the model has no trainable variables", hint="give the model that the optimizer trains")
    rest = [one for one in model.non_trainable_variables if all(one is not other for other in trained)]
    generators = [one for one in rest if _is_generator(one)]
    weights = _frozen(model)
    frozen = [one for one in rest if id(one) in weights]
    others = [one for one in rest if id(one) not in weights and not _is_generator(one)]
    return Variables(trainable=trained, frozen=frozen, others=others, generators=[*generators, *_shared_generator()])


def _is_generator(variable: Any) -> bool:
    return str(getattr(variable, "name", "")) == SEED


def _frozen(model: Any) -> set[int]:
    """Weights of layers that are not trained: nothing changes them, and shards need not be asked."""
    layers: Iterable[Any] = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    return {id(one) for layer in layers for one in layer._trainable_variables if not one.trainable}


def _shared_generator() -> list[Any]:
    """That of layers and functions which were given none."""
    try:
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError:  # no Keras
        return []
    return [global_seed_generator().state]
