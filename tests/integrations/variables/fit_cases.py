"""What fit takes and does, case by case, in one process and on Keras' torch backend: it starts fastest.

    KERAS_BACKEND=torch python fit_cases.py

Prints the name of each case that held. test_fit.py reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy
import torch

import holdfast.integrations.keras as on_keras
from holdfast import ConfigError

RNG = numpy.random.default_rng(0)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = numpy.abs(X[:, :3]).argmax(1)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A train_step of a person's own, that clips, and says something besides the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        loss.backward()
        gradients = [torch.clamp(one.value.grad, -0.001, 0.001) for one in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        self._loss_tracker.update_state(loss, sample_weight=len(x))
        return {"loss": loss, "largest": max(float(one.abs().max()) for one in gradients)}


def made(model: Any = None, *, rate: float = 0.1, metrics: Any = ("accuracy",), **options: Any) -> Any:
    keras.utils.clear_session()  # names are in the digest, and Keras counts them up
    keras.utils.set_random_seed(0)
    model = model or keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    on_keras.distribute(model, shards=4, seed=1, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(rate), loss=loss, metrics=list(metrics))
    return model


def over(model: Any) -> str:
    run = on_keras.run_of(model)
    digest = str(run.digest())
    run.close()
    return digest


def refused(call: Callable[[], Any], words: str) -> None:
    try:
        call()
    except ConfigError as error:
        assert words in str(error) and "hint:" in str(error), str(error)
        return
    raise AssertionError(f"it was not refused: {words}")


def case_metrics_are_those_of_the_whole_batch() -> None:
    """With a rate of nothing the model stays, and one epoch's metrics are those of an evaluation."""
    model = made(rate=0.0)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history
    over(model)
    whole = model.evaluate(X, Y, verbose=0, return_dict=True)
    for name in ("loss", "accuracy"):
        assert abs(history[name][1] - whole[name]) < 1e-6, (name, history, whole)


def case_one_step_is_the_step_of_plain_keras() -> None:
    """The mean over equal shards is the gradient of the whole batch, but for rounding."""
    model = made()
    model.fit(X, Y, batch_size=64, epochs=1, verbose=0, shuffle=False)
    over(model)
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    plain.compile(
        optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    plain.fit(X, Y, batch_size=64, epochs=1, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        assert numpy.abs(one - other).max() < 1e-6


def case_an_own_train_step() -> None:
    model = made(OwnStep(), rate=1.0)
    before = None

    class Weights(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            nonlocal before
            before = model.get_weights()

    history = model.fit(X, Y, batch_size=16, epochs=1, steps_per_epoch=2, verbose=0, callbacks=[Weights()]).history
    over(model)
    moved = max(float(numpy.abs(one - other).max()) for one, other in zip(before, model.get_weights(), strict=True))
    assert 0.0 < moved <= 0.002 + 1e-6, moved
    assert history["largest"] == [numpy.float32(0.001)], history


def case_early_stopping_and_initial_epoch() -> None:
    model = made(rate=0.0)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1.0)
    history = model.fit(X, Y, batch_size=16, epochs=20, initial_epoch=5, verbose=0, callbacks=[stop])
    run = on_keras.run_of(model)
    assert run.stopped == "a callback has set model.stop_training"
    assert history.epoch == [5, 6] and run.step == 8, (history.epoch, run.step)
    over(model)


def case_weights_of_classes_and_samples() -> None:
    by_class = made()
    by_class.fit(X, Y, batch_size=16, epochs=1, verbose=0, class_weight={0: 3.0, 1: 0.5})
    by_sample = made()
    weights = numpy.array([{0: 3.0, 1: 0.5}.get(int(label), 1.0) for label in Y])
    digest = over(by_class)
    by_sample.fit(X, Y, batch_size=16, epochs=1, verbose=0, sample_weight=weights)
    assert over(by_sample) == digest
    neither = made()
    neither.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    assert over(neither) != digest


def case_batches_of_a_dataset() -> None:
    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return X[index * 16 : index * 16 + 16], Y[index * 16 : index * 16 + 16]

    model, other = made(), made()
    model.fit(Data(), epochs=2, verbose=0)
    digest = over(model)
    other.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert over(other) == digest


def case_what_is_refused() -> None:
    refused(lambda: on_keras.distribute(torch.nn.Linear(1, 1)), "not a keras.Model")
    refused(lambda: on_keras.run_of(keras.Sequential()), "has joined no run yet")
    model = made()
    refused(lambda: model.fit(X, Y, batch_sizes=3), "fit has no argument 'batch_sizes'")
    refused(lambda: model.fit(iter([(X, Y)]), epochs=1), "of which nobody else could compute")
    refused(lambda: model.fit(X, Y, batch_size=15), "batch_size")
    model.fit(X, Y, batch_size=16, verbose=0)
    over(model)
    refused(lambda: model.fit(X, Y), "fit was called twice")
    twice = made()
    twice.train_step = lambda data: [twice.optimizer.apply([None, None], twice.trainable_variables) for _ in range(2)]
    refused(lambda: twice.fit(X, Y, batch_size=16, verbose=0), "has updated the model twice")
    over(twice)


def case_backup_and_restore_is_left_out() -> None:
    model = made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backup = keras.callbacks.BackupAndRestore("/nonexistent/holdfast")
        model.fit(X, Y, batch_size=16, epochs=1, verbose=0, callbacks=[backup])
    assert any("BackupAndRestore is left out" in str(one.message) for one in said)
    over(model)


def main() -> None:
    cases = [(name, call) for name, call in globals().items() if name.startswith("case_")]
    for name, call in cases:
        call()
        print("held", name, flush=True)


if __name__ == "__main__":
    main()
