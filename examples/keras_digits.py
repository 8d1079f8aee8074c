"""Handwritten digits with Keras 3: the model's own fit, on TensorFlow, JAX or torch, trained with Holdfast.

    python examples/keras_digits.py                                            # alone
    KERAS_BACKEND=torch holdfast run --workers 3 examples/keras_digits.py      # three workers: the same weights

Needs `pip install 'holdfast[keras,demo]'`. Reaches 96 % and more on the images that it was not shown.
"""

import argparse

import keras
from sklearn.datasets import load_digits

import holdfast.integrations.keras as holdfast_keras

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
x = images.reshape(-1, 8, 8, 1).astype("float32") / 16
held_out = slice(None, None, 5)  # every fifth image is kept for the test
shown = [number for number in range(len(x)) if number % 5]

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
holdfast_keras.distribute(model, shards=args.shards, seed=0)  # the one line that is not Keras'
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    x[shown],
    labels[shown],
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_data=(x[held_out], labels[held_out]),
)
run = holdfast_keras.run_of(model)
if run.leader:
    print(f"accuracy {history.history['val_accuracy'][-1]:.3f} on images that it was not shown")
    print(f"weights {run.digest()}")
