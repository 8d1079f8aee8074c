"""What fit was asked for, checked: its arguments by Keras' names, the data as a dataset, and what the two come to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import keras
import numpy

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.integrations.variables.arrays import Batches, Rows, batches_of_pipeline, is_pipeline, leaves, transformed

BATCH = 32  # as Keras has it


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Arguments of Model.fit, with its defaults."""

    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int = 1
    verbose: Any = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool = True
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "initial_epoch"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {value!r:.40}", hint=f"give {name} as a whole number")
        if self.steps_per_epoch is not None and (type(self.steps_per_epoch) is not int or self.steps_per_epoch < 1):
            raise ConfigError(f"steps_per_epoch is {self.steps_per_epoch!r:.40}", hint="give 1 or more, or nothing")
        if self.validation_split and self.validation_data is not None:
            raise ConfigError("fit got validation_split and validation_data", hint="leave one of them out")

    @staticmethod
    def of(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> FitSettings:
        """As a call of fit has them."""
        names = [one.name for one in fields(FitSettings)]
        unknown = [name for name in named if name not in names]
        if unknown:
            raise ConfigError(f"fit has no argument {unknown[0]!r}", hint=f"it has {', '.join(names)}")
        return FitSettings(**dict(zip(names, arguments, strict=False)), **named)

    def validates(self, epoch: int) -> bool:
        """After this epoch, counted from 0."""
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


@dataclass(frozen=True, kw_only=True)
class FitData:
    """What is trained on, how it is cut into steps, and what is validated with."""

    dataset: Any
    batch_size: int
    shuffle: bool
    steps_per_epoch: int
    validation: Any = None  # (x, y) or (x, y, weights) or a dataset of Keras; None: nothing


def data_of(settings: FitSettings, shards: int) -> FitData:
    x = settings.x
    if is_pipeline(x) or isinstance(x, keras.utils.PyDataset):
        return _batches(settings, shards)
    if not isinstance(x, (numpy.ndarray, tuple, list, dict)) and not hasattr(x, "__array__"):
        raise ConfigError(
            f"x is {a_kind(x)}, of which nobody else could compute a lost worker's part again",
            hint="give arrays, a tf.data.Dataset of batches, or a keras.utils.PyDataset",
        )
    rows = transformed(_with_weights(settings), _as_keras_has_it)
    validation = settings.validation_data
    if settings.validation_split:
        count = len(next(leaves(rows)))
        cut = int(count * (1.0 - settings.validation_split))
        validation = transformed(rows, lambda array: array[cut:])
        rows = transformed(rows, lambda array: array[:cut])
    dataset = Rows(rows)
    batch_size = BATCH if settings.batch_size is None else settings.batch_size
    steps = settings.steps_per_epoch or -(-len(dataset) // batch_size)
    return FitData(
        dataset=dataset,
        batch_size=batch_size,
        shuffle=bool(settings.shuffle),
        steps_per_epoch=steps,
        validation=validation,
    )


def _batches(settings: FitSettings, shards: int) -> FitData:
    given = [
        name
        for name in ("y", "batch_size", "sample_weight", "class_weight", "validation_split")
        if getattr(settings, name) not in (None, 0.0)
    ]
    if given:
        raise ConfigError(f"fit got {given[0]}, and data that has its own batches", hint=f"leave out {given[0]}")
    x = settings.x
    if isinstance(x, keras.utils.PyDataset) and type(x).on_epoch_end is not keras.utils.PyDataset.on_epoch_end:
        warnings.warn(
            f"{type(x).__name__}.on_epoch_end is not called: every epoch has the same batches, in the same order",
            stacklevel=2,
        )
    dataset = batches_of_pipeline(x, shards) if is_pipeline(x) else Batches(x.__getitem__, len(x), shards)
    return FitData(
        dataset=dataset,
        batch_size=shards,
        shuffle=False,
        steps_per_epoch=settings.steps_per_epoch or len(dataset) // shards,
        validation=settings.validation_data,
    )


def _with_weights(settings: FitSettings) -> tuple[Any, ...]:
    """(x,), (x, y) or (x, y, weights)."""
    weights = settings.sample_weight
    if weights is not None and settings.y is None:
        raise ConfigError("fit got sample_weight and no labels", hint="give y, or leave sample_weight out")
    if settings.class_weight is not None:
        if weights is not None or settings.y is None:
            raise ConfigError("fit got class_weight and no labels, or sample_weight too", hint="leave one of them out")
        labels = numpy.asarray(settings.y)
        one_hot = labels.ndim > 1 and labels.shape[-1] > 1
        labels = labels.argmax(-1) if one_hot else labels.reshape(len(labels), -1)[:, 0]
        known = {int(label): float(weight) for label, weight in settings.class_weight.items()}
        weights = numpy.asarray([known.get(int(label), 1.0) for label in labels])
    if settings.y is None:
        return (settings.x,)
    return (settings.x, settings.y) if weights is None else (settings.x, settings.y, weights)


def _as_keras_has_it(array: Any) -> Any:
    found = numpy.asarray(array)
    return found.astype(keras.config.floatx()) if found.dtype.kind == "f" else found
