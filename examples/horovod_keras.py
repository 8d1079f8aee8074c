"""Handwritten digits with Keras and Horovod's API: `model.fit` that goes on when workers are lost or come.

    holdfast run --workers 2 --horovod examples/horovod_keras.py
    holdfast run --workers 2 --horovod examples/horovod_keras.py --pause 0.05    # slow enough to kill a worker

The script is written for Horovod, and says nothing of Holdfast. Needs `pip install 'holdfast[tensorflow,demo]'`.
"""

import argparse
import time

import horovod.keras as hvd
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=32, help="of each worker")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of waiting in each step")
options = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
shown, held_back = slice(0, 1500), slice(1500, None)

model = keras.Sequential(
    [
        keras.layers.Input([8, 8, 1]),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.002)),
    metrics=["accuracy"],
)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def my_samples():
    """Every rank draws in an order of its own."""
    samples = tf.data.Dataset.from_tensor_slices((images[shown], labels[shown]))
    return samples.shuffle(1500, seed=hvd.rank()).repeat().batch(options.batch)


class Pause(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(options.pause)


@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        Pause(),
    ]
    state.model.fit(
        my_samples(),
        steps_per_epoch=1500 // options.batch // hvd.size(),
        epochs=options.epochs - state.epoch,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )


train(state)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(images[held_back], labels[held_back], verbose=0)
    print(f"{accuracy:.1%} of the {len(labels[held_back])} digits that it was not shown, with {hvd.size()} workers")
