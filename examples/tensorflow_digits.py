"""Handwritten digits in a TensorFlow loop with tf.GradientTape, trained with Holdfast.

    python examples/tensorflow_digits.py                                # alone
    holdfast run --workers 3 examples/tensorflow_digits.py              # three workers: the same weights

Needs `pip install 'holdfast[tensorflow,demo]'`. Reaches 95 % and more on the images that it was not shown.
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import holdfast.integrations.tensorflow as holdfast_tensorflow

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x = images.astype("float32") / 16
held_out = slice(None, None, 5)  # every fifth image is kept for the test
shown = [number for number in range(len(x)) if number % 5]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(3e-3)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
run = holdfast_tensorflow.join(
    model, optimizer, (x[shown], labels[shown]), batch_size=args.batch_size, shards=args.shards, seed=0
)


@tf.function
def shard(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_fn(targets, model(inputs, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


for step in run.epochs(args.epochs):
    for inputs, targets in step:  # this worker's shards; those of a lost one, too
        loss, gradients = shard(inputs, targets)
        step.gradients(gradients)
        step.record(loss=loss)
    step.apply()  # the optimizer, with the mean over all shards
    if step.ends_epoch and run.leader:
        print(f"epoch {step.epoch + 1}: loss {step.metrics['loss']:.3f}", flush=True)

right = tf.reduce_mean(tf.cast(tf.argmax(model(x[held_out]), 1) == labels[held_out], tf.float32))
if run.leader:
    print(f"accuracy {float(right):.3f} on images that it was not shown")
    print(f"weights {run.digest()}")
