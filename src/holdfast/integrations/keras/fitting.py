"""Model.fit on the step engine: the same epochs, batches and callbacks on every worker, each with its shards.

Owns the run and the mirror of the model. A step is one batch: its shards are computed by the model's own train_step,
the optimizer is called once with their mean, metrics are what all shards have added to them. Callbacks run inside the
step, so that what they change is in the state that travels to joiners and into checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from holdfast.core.errors import ConfigError
from holdfast.engine.api import joining
from holdfast.integrations.keras.callbacks import CallbackState, callbacks_of, settle_monitors
from holdfast.integrations.keras.computing import ShardStep, framework_of
from holdfast.integrations.keras.leading import LeaderOnly
from holdfast.integrations.keras.settings import FitData, FitSettings, data_of
from holdfast.integrations.variables.arrays import first, transformed
from holdfast.integrations.variables.finding import variables_of
from holdfast.integrations.variables.mirror import Mirror, Variables
from holdfast.integrations.variables.steps import VariableRun, VariableStep

CALLBACKS = "holdfast.callbacks"


class Fitting:
    """Of one model, which is trained once in a process. Belongs to the thread that calls fit."""

    def __init__(self, model: Any, *, shards: int, seed: int, threads: int, options: Mapping[str, Any]) -> None:
        self._model = model
        self._shards = shards
        self._seed = seed
        self._threads = threads
        self._options = dict(options)
        self._mirror: Mirror
        self._compute: ShardStep
        self.run: VariableRun | None = None

    def fit(self, settings: FitSettings) -> Any:
        model = self._model
        if self.run is not None:
            raise ConfigError(
                "fit was called twice on a distributed model",
                hint="train in one fit, with more epochs and callbacks that change what is to change between them",
            )
        if not model.compiled:
            raise ConfigError("the model is not compiled", hint="model.compile(optimizer=..., loss=...) before fit")
        data = data_of(settings, self._shards)
        callbacks = callbacks_of(
            settings.callbacks,
            lambda: self.run is not None and bool(self.run.leader),
            lambda: 0 if self.run is None else self.run.step,
        )
        run = self._join(data, callbacks)
        steps = data.steps_per_epoch
        whole = self._callback_list(callbacks, settings, steps)
        model.stop_training = False
        whole.on_train_begin()
        epoch, ended = -1, False
        logs: dict[str, float] = {}
        count = max(0, settings.epochs - settings.initial_epoch) * steps
        for step in run.steps(count):
            at, number = settings.initial_epoch + step.number // steps, step.number % steps
            if at != epoch:
                epoch = at
                self._begin_epoch(whole, epoch, anew=not number)
            logs = self._step(step, number, whole)
            if number == steps - 1:
                logs |= self._validate(data, settings, epoch)
                whole.on_epoch_end(epoch, logs)
                model.reset_metrics()
            if model.stop_training:
                run.stop("a callback has set model.stop_training")
            if model.stop_training or step.number == count - 1:
                whole.on_train_end(logs)  # in the last step, so that what it does to the weights is in the run
                ended = True
        if not ended:
            whole.on_train_end(logs)
        return model.history

    # ---- before the first step

    def _join(self, data: FitData, callbacks: list[Any]) -> VariableRun:
        model = self._model
        framework, computing = framework_of(keras.backend.backend())
        framework.prepare(self._threads)
        batch = transformed(_one_shard(data, self._shards), framework.batch)
        model._symbolic_build(data_batch=batch)
        model.optimizer.build(model.trainable_variables)
        model.reset_metrics()
        found = vars(variables_of(model))
        variables = Variables(**{**found, "optimizer": model.optimizer, "metrics": list(model.metrics_variables)})
        self._mirror = Mirror(framework, variables, shards=self._shards, seed=self._seed)
        self._compute = computing(model, framework)
        self._compile(batch)
        extras = {**self._options.pop("extras", {}), CALLBACKS: CallbackState(callbacks), **self._mirror.extras}
        run = joining.join(
            self._mirror.module,
            self._mirror.optimizer,
            data.dataset,
            batch_size=data.batch_size,
            shards=self._shards,
            seed=self._seed,
            shuffle=data.shuffle,
            collate_fn=first,
            extras=extras,
            threads=self._threads,
            **self._options,
        )
        self.run = VariableRun(run, self._mirror, lambda batch: transformed(batch, framework.batch))
        return self.run

    def _compile(self, batch: Any) -> None:
        """Once through a shard, before anybody waits for this worker: what it left in the variables is taken back."""
        if keras.backend.backend() != "torch":
            self._compute(batch)
            self._mirror.give_all()

    def _callback_list(self, callbacks: list[Any], settings: FitSettings, steps: int) -> Any:
        run = self.run
        assert run is not None
        verbose = settings.verbose
        if verbose == "auto":  # a line for each epoch where an agent collects what is printed, else a bar
            verbose = 2 if run.name else 1
        if verbose:
            callbacks = [*callbacks, LeaderOnly(keras.callbacks.ProgbarLogger(), lambda: bool(run.leader))]
        whole = keras.callbacks.CallbackList(
            callbacks, add_history=False, model=self._model, verbose=verbose, epochs=settings.epochs, steps=steps
        )
        settle_monitors(callbacks)
        return whole

    # ---- a step

    def _begin_epoch(self, callbacks: Any, epoch: int, *, anew: bool) -> None:
        """`anew`: else others have begun it, and what callbacks do then is in the state already."""
        if keras.backend.backend() == "torch":
            self._model.train()
        if anew:
            callbacks.on_epoch_begin(epoch)
            return
        remembered = CallbackState(callbacks.callbacks).state_dict()
        settled = {name: extra.state_dict() for name, extra in self._mirror.extras.items()}
        settled = {name: _cloned(state) for name, state in settled.items()}
        callbacks.on_epoch_begin(epoch)
        CallbackState(callbacks.callbacks).load_state_dict(remembered)
        for name, extra in self._mirror.extras.items():
            extra.load_state_dict(settled[name])

    def _step(self, step: VariableStep, number: int, callbacks: Any) -> dict[str, float]:
        model = self._model
        callbacks.on_train_batch_begin(number)
        own = set(model.metrics_names)
        for data in step:
            gradients, logs = self._compute(data)
            step.gradients(gradients)
            step.record(**{name: _number(value) for name, value in logs.items() if name == "loss" or name not in own})
        step.apply()
        found = {name: _number(value) for name, value in model.get_metrics_result().items()}
        found = {**{name: value for name, value in step.metrics.items() if name not in own}, **found}
        callbacks.on_train_batch_end(number, found)
        return found

    def _validate(self, data: FitData, settings: FitSettings, epoch: int) -> dict[str, float]:
        """By every worker itself: the same bits, since the weights are. What it costs is the same as in one process."""
        if data.validation is None or not settings.validates(epoch):
            return {}
        given = data.validation
        x, y, weights = given if isinstance(given, tuple) and len(given) == 3 else (*_pair(given), None)
        found = self._model.evaluate(
            x=x,
            y=y,
            sample_weight=weights,
            batch_size=settings.validation_batch_size or (settings.batch_size if y is not None else None),
            steps=settings.validation_steps,
            verbose=0,
            return_dict=True,
        )
        return {f"val_{name}": float(value) for name, value in found.items()}


def _pair(given: Any) -> tuple[Any, Any]:
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


def _one_shard(data: FitData, shards: int) -> Any:
    """A batch as shards have it; an epoch may have fewer samples than that."""
    count = max(1, data.batch_size // shards)
    return data.dataset.__getitems__([number % len(data.dataset) for number in range(count)])[0]


def _cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return value.clone() if hasattr(value, "clone") else value


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)
