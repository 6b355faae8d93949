"""Finds what a network with a layer that overflows has to compute in, and trains so.

Data: scikit-learn's 1,797 digits (8x8, uint8), a fifth for test; no network needed.
Command: python recipes/tune_precision.py        (measures what is fastest here first)
         python recipes/tune_precision.py --policy=mixed_float16 --plan=plan.json
         tfamp compare recipes.tune_precision:build --policies=float32,plan.json
Time: 30 s on 2 CPU cores. In float16 a CPU is slow: the plan is for a GPU then.
Expect: test accuracy of 0.97, at least 0.95. In float16 the layer 'overflow' is found
and kept in float32; in bfloat16, which has float32's range, nothing has to be.
"""

import json

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfamp

FLAGS = flags.FLAGS
if "get_ipython" in globals():  # in a notebook's cell, which may run again
    old = [f for f in FLAGS if "absl" not in FLAGS.find_module_defining_flag(f)]
    FLAGS.remove_flag_values(old)
flags.DEFINE_string("policy", "auto", "Dtype policy to keep layers out of.")
flags.DEFINE_integer("epochs", 15, "Passes over the data.")
flags.DEFINE_integer("batch_size", 64, "Images in a batch.")
flags.DEFINE_float("tolerance", 0.02, "Part by which the loss may grow.")
flags.DEFINE_string("plan", None, "File that gets the plan, for later runs.")
flags.DEFINE_integer("seed", 0, "Of weights and order.")
flags.DEFINE_boolean("smoke", False, "One short epoch, to see that it runs.")


@keras.saving.register_keras_serializable(package="recipes")
class Overflow(keras.layers.Layer):
    """Returns its inputs, by way of values a million times as large.

    float16 holds 65504 at most; float32 and bfloat16 get back what they had.
    """

    def build(self, input_shape):
        """Makes the gain a weight: a constant would be folded away."""
        gain = keras.initializers.Constant(1024.0)
        self.gain = self.add_weight(initializer=gain, trainable=False, name="gain")

    def call(self, inputs):
        """Returns the inputs."""
        gain = keras.ops.cast(self.gain, inputs.dtype)
        return inputs * gain * gain / gain / gain


def build(seed=0, batch_size=64):
    """Returns the compiled model, training and test data, as `tfamp tune` asks."""
    keras.utils.set_random_seed(seed)
    images, labels = load_digits(return_X_y=True)
    images = np.rint(images.reshape(-1, 8, 8, 1) * (255 / 16)).astype("uint8")
    x, x_test, y, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train = tfamp.data.Pipeline.from_arrays(x, y).shuffle(seed=seed)
    # Several batches: some to choose a plan by, the others to judge it by.
    test = tfamp.data.Pipeline.from_arrays(x_test, y_test).batch(batch_size)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu", name="before"),
            Overflow(name="overflow"),
            keras.layers.Dense(128, activation="relu", name="behind"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model, train.batch(batch_size, drop_remainder=True).build(), test.build()


def train_and_score() -> tuple[keras.Model, dict[str, float]]:
    """Trains under what is in force; returns the model and its test metrics."""
    model, train, test = build(FLAGS.seed, FLAGS.batch_size)
    if FLAGS.smoke:
        train, test = train.take(2), test.take(4)
    epochs = 1 if FLAGS.smoke else FLAGS.epochs
    model.fit(train, epochs=epochs, shuffle=False, verbose=2)
    return model, model.evaluate(test, verbose=0, return_dict=True)


def choose(model: keras.Model) -> str | tfamp.PrecisionPlan:
    """Returns what to train under: a policy, or a plan for each layer.

    Args:
        model: Trained in float32.
    """
    _, train, test = build(FLAGS.seed, FLAGS.batch_size)
    policy = FLAGS.policy
    if policy == "auto":
        measured = tfamp.measure_policies(
            model, train, budget_seconds=3 if FLAGS.smoke else 20
        )
        print(measured)
        policy = measured.best.policy
    if policy == "float32":
        return policy
    plan = tfamp.tune(
        model, train, policy=policy, tolerance=FLAGS.tolerance, validation=test
    )
    print(plan)
    return plan


def main(argv: list[str]) -> None:
    """Trains in float32, chooses, trains so; ends with a line of JSON."""
    with tfamp.scope("float32"):
        model, in_float32 = train_and_score()
        chosen = choose(model)
    status = tfamp.enable(policy=chosen)
    model, metrics = train_and_score()
    plan = tfamp.PrecisionPlan.from_model(model)
    if FLAGS.plan:
        plan.to_json(FLAGS.plan)
        print(f"Train under it: tfamp.enable(policy={FLAGS.plan!r})")
    in_float32 = {f"float32_{name}": value for name, value in in_float32.items()}
    kept = [name for name, rule in plan.kept.items() if rule == "tune"]
    print(json.dumps({"policy": status.policy, **metrics, **in_float32, "kept": kept}))


if __name__ == "__main__":
    # The arguments of a notebook's kernel are not ours.
    main(FLAGS(["recipe"])) if "get_ipython" in globals() else app.run(main)
