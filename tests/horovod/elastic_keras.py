"""A training for Horovod's elastic API with Keras: model.fit, with a commit after every batch.

    holdfast run --workers 2 --horovod tests/horovod/elastic_keras.py OUTPUT EPOCHS PAUSE_S

Writes the same lines as elastic_training.py, a batch being one that the optimizer has counted.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

OUTPUT, EPOCHS, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
STEPS = 5

hvd.init()
keras.utils.set_random_seed(hvd.rank())
random = np.random.default_rng(hvd.rank())
samples = tf.data.Dataset.from_tensor_slices((random.random((32, 8), np.float32), random.random((32, 1), np.float32)))
samples = samples.repeat().batch(4)
model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


class Log(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(PAUSE_S)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        weight = float(np.asarray(model.trainable_variables[0], np.float64).sum())
        number = int(model.optimizer.iterations.numpy())
        with (OUTPUT / f"{os.getpid()}.log").open("a") as log:
            log.write(f"{number} {hvd.rank()} {hvd.size()} {time.monotonic()} {weight!r} {len(resets)}\n")


callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
    Log(),
]


@hvd.elastic.run
def train(state: Any) -> None:
    state.model.fit(samples, steps_per_epoch=STEPS, epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=0)


train(state)
print(f"done at epoch {state.epoch}", flush=True)
