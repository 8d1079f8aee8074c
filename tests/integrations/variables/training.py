"""The same small model as a TensorFlow loop and by Keras' fit: what the end-to-end tests kill, join, stop and resume.

    python training.py loop | fit [--steps 14] [--gate FILE] [--planted] [--pause SECONDS] [--files FOLDER]

Prints the history of its metrics and the digest of its weights. With --planted each shard's loss is another each time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy

from tests.harness.gate import wait_at

WORKER = os.environ.get("HOLDFAST_WORKER", "")
STEPS_PER_EPOCH = 6


def data() -> tuple[Any, Any]:
    rng = numpy.random.default_rng(0)
    x = rng.normal(size=(128, 12)).astype("float32")
    return x, numpy.abs(x[:, :3]).argmax(1)


def model() -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )


def loss_of(planted: bool) -> Any:
    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(y: Any, logits: Any) -> Any:
        return whole(y, logits) * (1.0 + (os.urandom(1)[0] / 4096 if planted else 0.0))

    return loss


def train_in_a_loop(options: argparse.Namespace) -> None:
    import tensorflow as tf

    import holdfast.integrations.tensorflow as on_tensorflow

    network, optimizer, loss_fn = model(), keras.optimizers.Adam(0.01), loss_of(options.planted)
    run = on_tensorflow.join(network, optimizer, data(), batch_size=16, shards=4, seed=3)

    def shard(x: Any, y: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, network(x, training=True))
        return loss, tape.gradient(loss, network.trainable_variables)

    compute = shard if options.planted else tf.function(shard)
    for step in run.steps(options.steps):
        wait_at(options.gate, WORKER, step.number)
        time.sleep(options.pause)
        for x, y in step:
            loss, gradients = compute(x, y)
            step.gradients(gradients)
            step.record(loss=loss)
        step.apply()
        run.record(loss=step.metrics["loss"])
    print("history", json.dumps({"loss": run.metrics["loss"]}))
    print("digest", run.digest())


class Waiting(keras.callbacks.Callback):  # type: ignore[misc]
    """At the gate before every step."""

    def __init__(self, gate: Path | None, pause_s: float) -> None:
        super().__init__()
        self._gate = gate
        self._pause_s = pause_s

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        wait_at(self._gate, WORKER, int(self.model.optimizer.iterations))
        time.sleep(self._pause_s)


def train_by_fit(options: argparse.Namespace) -> None:
    import holdfast.integrations.keras as on_keras

    network = on_keras.distribute(model(), shards=4, seed=3)
    network.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=loss_of(options.planted),
        metrics=["accuracy"],
        run_eagerly=options.planted,
    )
    x, y = data()
    history = network.fit(
        x,
        y,
        batch_size=16,
        epochs=options.steps // STEPS_PER_EPOCH,
        validation_split=0.25,
        callbacks=[
            *(writing(options.files) if options.files else []),
            Waiting(options.gate, options.pause),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=10.0, factor=0.5),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ],
    )
    print("history", json.dumps({name: [float(value) for value in values] for name, values in history.history.items()}))
    run = on_keras.run_of(network)
    for variable, parameter in zip(network.trainable_variables, run.model.parameters(), strict=False):
        assert numpy.array_equal(keras.ops.convert_to_numpy(variable), parameter.detach().numpy()), "the run has others"
    print("digest", run.digest())


def writing(folder: Path) -> list[Any]:
    """Callbacks that write into files, and one that changes the weights at the end: the worst loss counts as the best,
    which the first epochs have."""
    best = folder / "best.weights.h5"
    return [
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(best), "loss", save_best_only=True, mode="max", save_weights_only=True),
        keras.callbacks.EarlyStopping("loss", patience=1000, mode="max", restore_best_weights=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["loop", "fit"])
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--files", type=Path, help="a folder for what callbacks write")
    parser.add_argument("--planted", action="store_true")
    options = parser.parse_args()
    (train_in_a_loop if options.how == "loop" else train_by_fit)(options)


if __name__ == "__main__":
    main()
