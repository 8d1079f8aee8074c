"""A training for Horovod's elastic API with TensorFlow: a tape in a tf.function, and a commit after every batch.

    holdfast run --workers 3 --horovod tests/horovod/elastic_tensorflow.py OUTPUT BATCHES PAUSE_S

Writes the same lines as elastic_training.py.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

OUTPUT, BATCHES, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

hvd.init()
tf.random.set_seed(hvd.rank())
model = tf.keras.Sequential([tf.keras.layers.Input([8]), tf.keras.layers.Dense(4)])
optimizer = tf.optimizers.SGD(0.05, momentum=0.9)


@tf.function  # type: ignore[untyped-decorator, unused-ignore]
def step(samples: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(samples)))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


@hvd.elastic.run
def train(state: Any) -> None:
    with (OUTPUT / f"{os.getpid()}.log").open("a", buffering=1) as log:
        while state.batch < BATCHES:
            step(tf.random.stateless_uniform([4, 8], [state.batch, hvd.rank()]))
            state.batch += 1
            time.sleep(PAUSE_S)
            state.commit()
            weight = float(tf.reduce_sum(tf.cast(model.trainable_variables[0], tf.float64)))
            log.write(f"{state.batch} {hvd.rank()} {hvd.size()} {time.monotonic()} {weight!r} {len(resets)}\n")


train(state)
print(f"done at {state.batch}", flush=True)
