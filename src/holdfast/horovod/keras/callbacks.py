"""Callbacks for `model.fit` on all ranks. Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from holdfast.horovod.basics import rank, size
from holdfast.horovod.keras.models import broadcast_model
from holdfast.horovod.tensorflow.reductions import grouped_allreduce

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """All variables of the model and its optimizer become the root's, when the first batch has made them."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local_variables = list(local_variables or ())

    def register_local_var(self, var: Any) -> None:
        """This one stays what it is on each rank."""
        self._local_variables.append(var)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self.broadcast_done:
            broadcast_model(self.model, self.root_rank, self._local_variables)
            self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, the metrics in the logs become their mean over ranks, for the callbacks after it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = [tf.convert_to_tensor(float(np.asarray(logs[name])), tf.float64) for name in names]
        for name, mean in zip(names, grouped_allreduce(values), strict=True):
            logs[name] = float(mean)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Between two epochs, the learning rate is initial_lr times a number, or a function of the epoch.

    A staircase changes it at the beginning of each epoch, otherwise it changes every batch. Momentum correction: what
    has been gathered as momentum is scaled with the learning rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is missing: the learning rate that the multiplier is for")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier = multiplier if callable(multiplier) else _power(multiplier, start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__} needs steps_per_epoch: Keras does not know it")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(float(self.current_epoch))
        else:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate.numpy()), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and before and before != after and getattr(optimizer, "momentum", 0):
            # Keras's momentum is a constant of the compiled step: what it is multiplied with is scaled instead.
            for velocity in getattr(optimizer, "momentums", ()):
                velocity.assign(velocity * (after / before))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate.numpy())


def _power(base: float, start_epoch: int) -> Callable[[float], float]:
    return lambda epoch: float(base ** (epoch - start_epoch))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From initial_lr / hvd.size() to initial_lr, a little each batch, in the first epochs."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One batch ahead, so that an epoch ends with a round number.
            assert self.steps_per_epoch is not None
            reached = (epoch + 1.0 / self.steps_per_epoch) / warmup_epochs
            return (1.0 + reached * (size() - 1)) / size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {logs['lr'] if logs else '?':g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keeps the best model. `filepath` is to be set before it is used: Keras 3 wants one from the beginning."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best.weights.h5",
    ) -> None:
        name = filepath if save_weights_only or not filepath.endswith(".weights.h5") else "best.keras"
        super().__init__(
            filepath=name,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
