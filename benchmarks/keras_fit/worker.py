"""One process of benchmarks/keras.py: a model that computes, by plain fit or by a distributed one; prints what it took.

    python benchmarks/keras_fit/worker.py plain | holdfast [--width 512] [--steps 12]

Plain fit takes the micro-batches that shards are, one by one. What is timed begins after the first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import keras
import numpy

import holdfast.integrations.keras as on_keras

SHARDS = 8


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.took_s: list[float] = []
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.took_s.append(time.perf_counter() - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["plain", "holdfast"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=512, help="samples of a step; a shard has an eighth of them")
    parser.add_argument("--steps", type=int, default=8, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=16, help="the best counts: others may want the processor, too")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    rng = numpy.random.default_rng(0)
    x = rng.normal(size=(options.batch * options.steps, options.width)).astype("float32")
    y = rng.integers(0, 10, size=len(x))
    hidden = [keras.layers.Dense(options.width, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((options.width,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if options.how == "holdfast":
        on_keras.distribute(model, shards=SHARDS, seed=0)
    elif keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=loss, metrics=["accuracy"])
    clock = Clock()
    batch = options.batch if options.how == "holdfast" else options.batch // SHARDS
    model.fit(x, y, batch_size=batch, epochs=options.epochs, verbose=0, callbacks=[clock])
    figures = {"epoch_s": min(clock.took_s[1:]), "samples_per_s": len(x) / min(clock.took_s[1:])}
    if options.how == "plain" or on_keras.run_of(model).leader:
        print(f"figures {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
