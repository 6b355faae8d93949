"""Trains a small convolutional network to read handwritten digits.

Data: scikit-learn's 1,797 digits (8x8, uint8), a fifth for test; no network needed.
Command: python recipes/train_digits.py                    (the best policy here)
         python recipes/train_digits.py --policy=auto,float32   (side by side)
         python recipes/train_digits.py --compare=5    (is it as good, and faster?)
Time: about 15 s on 2 CPU cores in float32 and mixed_bfloat16. CPUs convolve in
float16 some hundred times slower: try that with --epochs=1, or on a GPU.
Expect: test accuracy of 0.99, at least 0.98, in float32 and mixed_bfloat16 alike.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

import datasets  # noqa: E402  (TensorFlow reads its log level when it is imported)
import fitting_in_memory  # noqa: E402
import guarding  # noqa: E402
import injecting  # noqa: E402
import reporting  # noqa: E402
import tfamp  # noqa: E402
from progress import TrainingProgress  # noqa: E402

TITLE = "Handwritten digits"
# Of the accuracy, for --compare: less than 0.01 is more than 360 test images can show.
TOLERANCE = 0.02
COLUMNS = {
    "accuracy": ("accuracy", ".4f"),
    "loss": ("loss", ".4f"),
    "examples_per_second": ("examples/s", ",.0f"),
    "step_milliseconds": ("ms/step", ".1f"),
    "seconds": ("seconds", ".1f"),
}


def define_flags() -> flags.FlagValues:
    """Returns the recipe's flags with their defaults."""
    values = flags.FlagValues()
    reporting.define_common_flags(values)
    injecting.define_flags(values)
    guarding.define_flags(values)
    fitting_in_memory.define_flags(values)
    flags.DEFINE_string(
        "dataset",
        "digits",
        "digits, or any TFDS name of small uint8 images with labels, such as mnist.",
        flag_values=values,
    )
    flags.DEFINE_integer("epochs", 30, "Passes over the data.", flag_values=values)
    flags.DEFINE_integer("batch_size", 64, "Images in a batch.", flag_values=values)
    flags.DEFINE_float("learning_rate", 2e-3, "At the start.", flag_values=values)
    return values


def build_model(
    input_shape: Sequence[int],
    num_classes: int,
    learning_rate: Any = 2e-3,
    inject: str | None = None,
    accumulation_steps: int = 1,
) -> keras.Model:
    """Returns the compiled network. It takes uint8 images and scales them itself."""
    images = keras.Input(input_shape, dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    for filters in (64, 128):
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
        # A run has a few hundred steps: the default momentum of 0.99 lags behind.
        x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = injecting.layer(inject, x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.4)(x)
    x = keras.layers.Dense(128, activation="relu")(x)
    x = keras.layers.Dropout(0.4)(x)
    outputs = keras.layers.Dense(num_classes, activation="softmax")(x)
    model = keras.Model(images, outputs)
    model.compile(
        optimizer=fitting_in_memory.accumulating(
            keras.optimizers.Adam(learning_rate), accumulation_steps
        ),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def load(settings: Any) -> tuple[Any, Any, int]:
    """Returns the training and test pipelines and the number of classes."""
    if settings.smoke:
        rng = np.random.default_rng(settings.seed)
        images = rng.integers(0, 256, (2 * settings.batch_size, 8, 8, 1), np.uint8)
        labels = rng.integers(0, 10, len(images))
        arrays = tfamp.data.Pipeline.from_arrays(images, labels)
        return arrays, arrays, 10
    builder = datasets.find(settings.dataset)
    train = tfamp.data.Pipeline.from_tfds(builder, "train")
    test = tfamp.data.Pipeline.from_tfds(builder, datasets.evaluation_split(builder))
    _, label = builder.info.supervised_keys
    return train, test, builder.info.features[label].num_classes


def build(
    settings: Any = None, *, seed: int | None = None, epochs: int | None = None
) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model, training and test data, as `tfamp.compare` asks.

    Args:
        settings: Values of the flags; None takes their defaults.
        seed: Instead of that of the settings; it decides weights and order.
        epochs: Likewise; the learning rate falls over so many.
    """
    settings = reporting.resolve(define_flags, settings, seed=seed, epochs=epochs)
    keras.utils.set_random_seed(settings.seed)
    train_images, test_images, num_classes = load(settings)
    train_data = (
        train_images.cache("memory")
        .shuffle(seed=settings.seed)
        .batch(settings.batch_size, drop_remainder=True)
        .prefetch()
        .build()
    )
    train_data = injecting.batches(settings.inject, train_data)
    test_data = test_images.cache("memory").batch(256).prefetch().build()
    num_updates = fitting_in_memory.num_updates(
        int(train_data.cardinality()), settings.accumulation_steps
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        injecting.learning_rate(settings), settings.epochs * num_updates
    )
    shape = train_data.element_spec[0].shape[1:]
    model = build_model(
        shape, num_classes, schedule, settings.inject, settings.accumulation_steps
    )
    model.jit_compile = settings.jit_compile
    return model, train_data, test_data


def train(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Trains under one policy and returns what came of it."""
    settings = reporting.resolve(define_flags, flag_values)
    status = reporting.enable(settings)
    injecting.announce(settings)
    settings, memory = fitting_in_memory.fitted(settings, build)
    model, train_data, test_data = build(settings)
    progress = TrainingProgress(f"digits {status.policy}")
    started = time.perf_counter()
    guard = guarding.Guard(settings)
    model.fit(
        train_data,
        epochs=settings.epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*guard.callbacks, progress],
    )
    seconds = time.perf_counter() - started
    loss, accuracy = model.evaluate(test_data, verbose=0)
    num_steps = int(train_data.cardinality())
    num_examples = num_steps * settings.batch_size
    return {
        "recipe": "train_digits",
        "asked": settings.policy[0],
        "policy": status.policy,
        "reason": status.reason,
        "accuracy": round(accuracy, 4),
        "loss": round(loss, 4),
        **reporting.speed(progress.epoch_seconds, num_examples, num_steps),
        "seconds": round(seconds, 2),
        "finite": reporting.is_finite(model, loss, accuracy),
        **guard.report(),
        **memory,
        "versions": reporting.versions(),
    }


def main(argv: Sequence[str]) -> int:
    """Trains once, or once for each policy, and prints the result."""
    return reporting.run_recipe(TITLE, define_flags(), argv, train, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
