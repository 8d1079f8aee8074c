"""holdfast.integrations.keras.distribute: the model's own fit becomes one that drives the step engine."""

from __future__ import annotations

import functools
from typing import Any

import keras

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.integrations.keras.fitting import Fitting
from holdfast.integrations.keras.settings import FitSettings
from holdfast.integrations.variables.steps import VariableRun

_FITTING = "_holdfast_fitting"


def distribute(model: Any, *, shards: int = 8, seed: int = 0, threads: int = 1, **options: Any) -> Any:
    """The model itself; its fit trains with all workers of the run that this process was started for.

    A step takes batch_size samples in `shards` equal shards. With the same seed, batch_size and shards the weights are
    the same bits for any number of workers, whatever fails. The other options are those of holdfast.join that say
    nothing of data: checkpoint, non_finite, spike, mode, aggregate, extras.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"the model is {a_kind(model)}, not a keras.Model", hint="distribute(model, shards=8)")
    fitting = Fitting(model, shards=shards, seed=seed, threads=threads, options=options)

    @functools.wraps(type(model).fit)
    def fit(*arguments: Any, **named: Any) -> Any:
        return fitting.fit(FitSettings.of(arguments, named))

    vars(model)["fit"] = fit  # past Keras, which looks at everything that is assigned to a model
    vars(model)[_FITTING] = fitting
    return model


def run_of(model: Any) -> VariableRun:
    """The run that the model's fit has joined: for its digest, and what else holdfast.Run has."""
    fitting = vars(model).get(_FITTING)
    if fitting is None or fitting.run is None:
        raise ConfigError("the model has joined no run yet", hint="distribute(model), then model.fit(...)")
    return fitting.run  # type: ignore[no-any-return]
