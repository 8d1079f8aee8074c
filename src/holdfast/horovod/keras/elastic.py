"""Elastic training with Keras: `elastic.run`, `elastic.KerasState`, and callbacks that keep the state up to date."""

from __future__ import annotations

from typing import Any

import keras

from holdfast.horovod.tensorflow.elastic import ObjectState as ObjectState
from holdfast.horovod.tensorflow.elastic import State as State
from holdfast.horovod.tensorflow.elastic import TensorFlowKerasState
from holdfast.horovod.tensorflow.elastic import run as run

Logs = dict[str, Any] | None


class KerasState(TensorFlowKerasState):
    """A model and its optimizer, which may be the one that it is compiled with, and plain values."""


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state every so many batches, and at the end of each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        self.batches_remaining = self.batches_per_commit  # the same for who was there and who came

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """`state.batch` is the number of the last batch of this epoch, and 0 when it is over.

    As with Horovod, callbacks are told that the first epoch after the world has formed anew is shorter by it. Keras
    itself makes as many steps as `fit` says: give it `steps_per_epoch` less `state.batch` for a shorter one.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """`state.epoch` is the number of epochs that are over, counted through all worlds."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
