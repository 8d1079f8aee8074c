"""holdfast.integrations.tensorflow.join: what it was given becomes a mirror, and the mirror joins the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import tensorflow as tf

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.engine.api import joining
from holdfast.integrations.variables.arrays import (
    Rows,
    batches_of_pipeline,
    first,
    is_pipeline,
    stacked,
    transformed,
)
from holdfast.integrations.variables.finding import variables_of
from holdfast.integrations.variables.mirror import Mirror, Variables
from holdfast.integrations.variables.on_tensorflow import OnTensorFlow
from holdfast.integrations.variables.steps import VariableRun

_CALL = "holdfast.integrations.tensorflow.join(model, optimizer, (x, y), batch_size=...)"


def join(
    model: Any,
    optimizer: Any,
    dataset: Any,
    *,
    batch_size: int | None = None,
    shards: int = 8,
    seed: int = 0,
    extras: Mapping[str, Any] | None = None,
    threads: int = 1,
    **options: Any,
) -> VariableRun:
    """Take part in the run that this process was started for; started by hand, be a run of one.

    `model` is a keras.Model, a tf.Module or a list of tf.Variables; `optimizer` is one of Keras'. `dataset` is arrays
    such as (x, y), anything with __len__ and __getitem__, or a tf.data.Dataset of batches: each of those is
    one step, and batch_size is left out. `extras` are further variables that change during training, by name: one, a
    list, or anything that has `variables`. The other options are those of holdfast.join.
    """
    _check_optimizer(optimizer)
    framework = OnTensorFlow()
    framework.prepare(threads)
    variables = variables_of(model)
    optimizer.build(variables.trainable)
    tracked, own = _extras(extras)
    found = Variables(**{**vars(variables), "optimizer": optimizer, "extras": tracked})
    mirror = Mirror(framework, found, shards=shards, seed=seed)
    samples, how = _samples(dataset, shards, batch_size, options)
    run = joining.join(
        mirror.module,
        mirror.optimizer,
        samples,
        shards=shards,
        seed=seed,
        extras={**own, **mirror.extras},
        threads=threads,
        **how,
    )
    return VariableRun(run, mirror, lambda batch: transformed(batch, framework.batch))


def _check_optimizer(optimizer: Any) -> None:
    if not all(hasattr(optimizer, name) for name in ("apply", "build", "variables", "iterations")):
        raise ConfigError(f"the optimizer is {a_kind(optimizer)}, not one of keras.optimizers", hint=_CALL)


def _extras(extras: Mapping[str, Any] | None) -> tuple[dict[str, Sequence[Any]], dict[str, Any]]:
    """Those that are variables, and those that keep a state of their own."""
    tracked: dict[str, Sequence[Any]] = {}
    own: dict[str, Any] = {}
    for name, extra in (extras or {}).items():
        if callable(getattr(extra, "state_dict", None)):
            own[name] = extra
        elif isinstance(extra, (list, tuple)):
            tracked[name] = extra
        elif isinstance(extra, tf.Variable):
            tracked[name] = [extra]
        elif hasattr(extra, "variables"):
            tracked[name] = list(extra.variables)
        else:
            raise ConfigError(
                f"extras[{name!r}] is {a_kind(extra)}, which has no variables",
                hint="give a tf.Variable, a list of them, or something with `variables`, such as a Keras metric",
            )
    return tracked, own


def _samples(dataset: Any, shards: int, batch_size: int | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset for holdfast.join, and how it is asked for."""
    collate: Callable[[Any], Any] = stacked
    if is_pipeline(dataset):
        if batch_size is not None:
            raise ConfigError(
                "batch_size was given, and a tf.data.Dataset that has its own batches",
                hint="leave out batch_size, or give arrays",
            )
        return batches_of_pipeline(dataset, shards), {
            **options,
            "batch_size": shards,
            "shuffle": False,
            "collate_fn": first,
        }
    if isinstance(dataset, (tuple, list, dict, numpy.ndarray, tf.Tensor)):
        dataset, collate = Rows(dataset), first
    return dataset, {"collate_fn": collate, **options, "batch_size": batch_size}
