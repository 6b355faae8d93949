"""Trains a small convolutional network to read handwritten digits.

Data: scikit-learn's 1,797 digits, a fifth for test; or any TFDS name of small images
with labels; or a folder that holds train/CLASS/*.png and test/CLASS/*.png.
Command: python recipes/train_digits.py
         python recipes/train_digits.py --dataset=mnist --epochs=3
         tfamp compare recipes.train_digits:build --epochs=20 --tolerance=0.02
Time: 15 s on 2 CPU cores in float32. CPUs convolve in float16 some hundred times
slower: try that with --epochs=1, or on a GPU.
Expect: test accuracy of 0.99, at least 0.98, in float32 and mixed_bfloat16 alike.
"""

import json
import os

import keras
import numpy as np
from absl import app, flags

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy, or the file of a plan.")
flags.DEFINE_string("dataset", "digits", "digits, a TFDS name, or a folder.")
flags.DEFINE_integer("epochs", 30, "Passes over the data.")
flags.DEFINE_integer("batch_size", 64, "Images in a batch.")
flags.DEFINE_float("learning_rate", 2e-3, "Of Adam, at the start.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("jit_compile", False, "Compile with XLA.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load(dataset: str) -> tuple[tfamp.data.Pipeline, tfamp.data.Pipeline]:
    """Returns pipelines of (image, label) for training and test; images are uint8."""
    Pipeline = tfamp.data.Pipeline
    if dataset == "digits":
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        # 17 gray levels, spread to 0..255 as other images have them.
        images = np.rint(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype("uint8")
        x, x_test, y, y_test = train_test_split(
            images, labels, test_size=0.2, stratify=labels, random_state=0
        )
        return Pipeline.from_arrays(x, y), Pipeline.from_arrays(x_test, y_test)
    if os.path.isdir(dataset) or dataset.startswith((".", "/", "~")):
        root = os.path.expanduser(dataset)
        folders = (os.path.join(root, part) for part in ("train", "test"))
        train, test = (Pipeline.from_images(f).decode((28, 28)) for f in folders)
        return train, test
    return Pipeline.from_tfds(dataset, "train"), Pipeline.from_tfds(dataset, "test")


def build_model(shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Returns the network. It takes uint8 images and scales them itself."""
    images = keras.Input(shape, dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    for filters in (64, 128):
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
        # A run has a few hundred steps: the default momentum of 0.99 lags behind.
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.4)(x)
    x = keras.layers.Dense(128, activation="relu")(x)
    x = keras.layers.Dropout(0.4)(x)
    outputs = keras.layers.Dense(num_classes, activation="softmax")(x)
    return keras.Model(images, outputs)


def build(seed=0, epochs=30, dataset="digits", batch_size=64, learning_rate=2e-3):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    train, test = load(dataset)
    train = train.cache("memory").shuffle(seed=seed)
    train_data = train.batch(batch_size, drop_remainder=True).prefetch().build()
    test_data = test.cache("memory").batch(256).prefetch().build()
    labels = np.concatenate([y for _, y in test_data.as_numpy_iterator()])
    model = build_model(train_data.element_spec[0].shape[1:], int(labels.max()) + 1)
    num_steps = epochs * int(train_data.cardinality())
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model, train_data, test_data


def main(argv: list[str]) -> None:
    """Trains, and prints the test metrics as a line of JSON."""
    status = tfamp.enable(policy=FLAGS.policy)
    print(f"{status.policy}: {status.reason}")
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    model, train, test = build(
        FLAGS.seed, epochs, FLAGS.dataset, FLAGS.batch_size, FLAGS.learning_rate
    )
    model.jit_compile = FLAGS.jit_compile
    if FLAGS.smoke:
        train, test = train.take(2), test.take(2)
    # Examples a second, and how long steps wait for their batches, in the bar.
    model.fit(
        train, epochs=epochs, shuffle=False, callbacks=[tfamp.callbacks.Throughput()]
    )
    metrics = model.evaluate(test, verbose=0, return_dict=True)
    print(json.dumps({"policy": status.policy, **metrics}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
