"""What fit takes and does, case by case, in one process and on Keras' torch backend: it starts fastest.

    KERAS_BACKEND=torch python fit_cases.py

Prints the name of each case that held. test_fit.py reads them.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy
import torch

import holdfast.integrations.keras as on_keras
from holdfast import ConfigError
from holdfast.integrations.keras import leading

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


def case_the_end_of_training_is_in_the_last_step() -> None:
    """So what it does to the weights is in the state that is saved, also where a callback has ended the training."""

    class End(keras.callbacks.Callback):  # type: ignore[misc]
        steps: list[int | None]

        def on_train_end(self, logs: Any = None) -> None:
            current = on_keras.run_of(self.model).engine.current
            self.steps.append(None if current is None else current.number)

    for patience in (1, 100):
        model, end = made(), End()
        end.steps = []
        # Less is never better here, so the first epoch's weights are the best.
        stop = keras.callbacks.EarlyStopping("loss", patience=patience, mode="max", restore_best_weights=True)
        model.fit(X, Y, batch_size=16, epochs=4, verbose=0, callbacks=[stop, end])
        epochs = 4 if patience == 100 else 2
        assert end.steps == [4 * epochs - 1], end.steps
        digest = over(model)
        first = made()
        first.fit(X, Y, batch_size=16, epochs=1, verbose=0)
        for one, other in zip(model.get_weights(), first.get_weights(), strict=True):
            assert numpy.array_equal(one, other)
        over(first)
        assert digest == over_again(model)


def over_again(model: Any) -> str:
    """The digest of what the model has, in the run that is over."""
    return str(on_keras.run_of(model).digest())


class Leading:
    """Who is the leader, and how far the run is."""

    def __init__(self, *, leads: bool, steps: int = 0) -> None:
        self.leads, self.steps = leads, steps

    def led(self, callback: Any) -> Any:
        wrapped = leading.led(callback, lambda: self.leads, lambda: self.steps)
        wrapped.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
        return wrapped


def epochs_of(path: Path) -> list[str]:
    return [line.partition(",")[0] for line in path.read_text().splitlines()]


def case_the_next_leader_goes_on_with_a_log() -> None:
    """The row that the lost leader did not come to is written, and one that its successor makes again is not twice."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.csv")
        for written, expected in (("", "012"), ("0", "012"), ("01", "012"), ("0|1,2", "012")):
            path.write_text("an old training\n")
            first, second = Leading(leads=True), Leading(leads=False)
            logs = [one.led(keras.callbacks.CSVLogger(str(path))) for one in (first, second)]
            for log in logs:
                log.on_train_begin()
            for epoch in (0, 1):
                for log in logs if str(epoch) in written.partition("|")[0] else logs[1:]:
                    log.on_epoch_begin(epoch)
                    log.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.25})
            if not written:
                path.write_text("")
            elif half := written.partition("|")[2]:
                path.write_text(path.read_text() + half)  # it was killed in the middle of a row
            second.leads, second.steps = True, 8
            logs[1].on_epoch_begin(2)
            logs[1].on_epoch_end(2, {"loss": 0.5, "val_loss": 0.25})
            logs[1].on_train_end()
            found = epochs_of(path)
            assert found[0] == "epoch" and found[1:] in (list(expected), list(expected)[1:]), (written, found)
            assert written == "" or found[1:] == list(expected), (written, found)
        again = Leading(leads=True, steps=8)
        log = again.led(keras.callbacks.CSVLogger(str(path)))
        log.on_train_begin()
        log.on_epoch_begin(1)  # as a run does that was resumed from before it
        for epoch in (1, 2):
            log.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.25})
        log.on_train_end()
        assert epochs_of(path) == ["epoch", "0", "1", "2"]
        fresh = Leading(leads=True).led(keras.callbacks.CSVLogger(str(path)))
        fresh.on_train_begin()
        fresh.on_epoch_begin(0)
        fresh.on_epoch_end(0, {"loss": 1.0})
        fresh.on_train_end()
        assert epochs_of(path) == ["epoch", "0"], "a run from the beginning writes a file of its own"


def case_the_next_leader_knows_the_best_so_far() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "best.weights.h5")
        second = Leading(leads=False)
        saving = second.led(
            keras.callbacks.ModelCheckpoint(str(path), "loss", save_best_only=True, mode="min", save_weights_only=True)
        )
        saving.on_epoch_begin(0)
        saving.on_epoch_end(0, {"loss": 0.5})
        assert not path.exists() and saving.state_dict()["best"] == 0.5
        third = Leading(leads=True, steps=8)
        joined = third.led(
            keras.callbacks.ModelCheckpoint(str(path), "loss", save_best_only=True, mode="min", save_weights_only=True)
        )
        joined.load_state_dict(saving.state_dict())
        second.leads = True
        for one in (saving, joined):
            one.on_epoch_end(1, {"loss": 0.75})
            assert not path.exists(), "a better one was saved by the leader before"
        joined.on_epoch_end(2, {"loss": 0.25})
        assert path.exists()


def case_what_is_not_called_is_said() -> None:
    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return X[index * 16 : index * 16 + 16], Y[index * 16 : index * 16 + 16]

        def on_epoch_end(self) -> None:
            raise AssertionError("nobody else would have called it")

    model = made()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(Data(), epochs=2, verbose=0)
    assert any("Data.on_epoch_end is not called" in str(one.message) for one in said)
    over(model)


def case_what_is_refused() -> None:
    refused(lambda: on_keras.distribute(torch.nn.Linear(1, 1)), "not a keras.Model")
    refused(lambda: on_keras.run_of(keras.Sequential()), "has joined no run yet")
    model = made()
    refused(lambda: model.fit(X, sample_weight=numpy.ones(64)), "sample_weight and no labels")
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
