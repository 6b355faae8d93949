"""Trains a digit reader, exports it to int8, and trains it with int8's rounding.

Needs tfamp[onnx]. The images are taken in light and shade, so that a range of 256 steps
that holds the bright ones leaves few steps to the dark ones.
Data: scikit-learn's 1,797 digits (8x8), two fifths for test; no network needed.
Command: python recipes/quantize_digits.py
         tfamp compare recipes.quantize_digits:build
Time: 60 s on 2 CPU cores.
Expect: test accuracy of 0.97 in float32, 0.85 in int8, 0.96 after training with it.
"""

import json

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "float32", "Dtype policy that it trains under.")
flags.DEFINE_integer("epochs", 60, "Passes over the data; two thirds more with int8.")
flags.DEFINE_string("path", "digits_int8", "Folder that gets the export.")
flags.DEFINE_boolean("smoke", False, "Two steps, to see that it runs.")


def load():
    """Returns training and test arrays; images are float32 in other lights."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    light = np.random.default_rng(3).lognormal(0, 1.2, size=(len(images), 1))
    images, labels = (images[order] / 16 * light).astype("float32"), labels[order]
    end = int(0.6 * len(images))
    return (images[:end], labels[:end]), (images[end:], labels[end:])


def build(seed=1):
    """Returns the compiled model, training and test data."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((64,), name="image"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, name="digit"),
        ]
    )
    compiled(model, 3e-3)
    return model, *load()


def compiled(model, rate):
    """Compiles the model with a learning rate."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])


def exported(model, folder, train, test):
    """Returns the test accuracy of an int8 export of the model."""
    made = tfamp.export(
        model, folder, format="onnx", dtype="int8", scheme="static", calibration=train
    )
    return float(np.mean(made.load().predict(test[0]).argmax(axis=1) == test[1]))


def main(argv):
    """Trains, exports, trains with the rounding, exports again, and tells."""
    del argv
    tfamp.enable(policy=FLAGS.policy)
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    model, train, test = build()
    model.fit(*train, batch_size=64, epochs=epochs, verbose=0)
    told = {"float32": model.evaluate(*test, verbose=0)[1]}
    told["int8"] = exported(model, f"{FLAGS.path}_before", train, test)

    tfamp.quantize_aware(model)
    compiled(model, 3e-4)
    model.fit(*train, batch_size=64, epochs=max(1, epochs * 2 // 3), verbose=0)
    told["trained with int8"] = model.evaluate(*test, verbose=0)[1]
    told["its export"] = exported(model, FLAGS.path, train, test)
    for name, accuracy in told.items():
        print(f"{name:>18}: test accuracy {accuracy:.3f}")
    print(json.dumps({"policy": tfamp.status().policy, **told}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
