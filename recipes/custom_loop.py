"""Trains a digit reader in a loop of its own, with all that `fit` does by itself.

The loop scales the loss, clips gradients, and adds up microbatches to an update.
Data: scikit-learn's 1,797 digits (8x8, uint8), a fifth for test; no network needed.
Command: python recipes/custom_loop.py                     (the best policy here)
         python recipes/custom_loop.py --policy=mixed_float16 --accumulation_steps=4
         python recipes/custom_loop.py --compare=5    (is it as good, and faster?)
Time: about 10 s on 2 CPU cores in float32 and mixed_bfloat16, half a minute in float16.
Expect: test accuracy of 0.97, at least 0.95, in every policy.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402

import datasets  # noqa: E402  (TensorFlow reads its log level when it is imported)
import reporting  # noqa: E402
import tfamp  # noqa: E402

TITLE = "Handwritten digits, a loop of its own"
COLUMNS = {
    "accuracy": ("accuracy", ".4f"),
    "loss": ("loss", ".4f"),
    "updates": ("updates", ",d"),
    "skipped": ("skipped", ",d"),
    "step_milliseconds": ("ms/step", ".1f"),
    "seconds": ("seconds", ".1f"),
}


def define_flags() -> flags.FlagValues:
    """Returns the recipe's flags with their defaults."""
    values = flags.FlagValues()
    reporting.define_common_flags(values)
    flags.DEFINE_integer("epochs", 20, "Passes over the data.", flag_values=values)
    flags.DEFINE_integer(
        "batch_size", 16, "Images in a microbatch.", flag_values=values
    )
    flags.DEFINE_integer(
        "accumulation_steps", 4, "Microbatches in an update.", flag_values=values
    )
    flags.DEFINE_float(
        "clip_norm", 1.0, "Largest norm of an update's gradients.", flag_values=values
    )
    flags.DEFINE_float("learning_rate", 2e-3, "Adam's.", flag_values=values)
    return values


def build_model(num_classes: int = 10) -> keras.Model:
    """Returns the network. It takes uint8 images and gives logits."""
    images = keras.Input((8, 8, 1), dtype="uint8")
    x = keras.layers.Rescaling(1 / 255)(images)
    x = keras.layers.Flatten()(x)
    for _ in range(2):
        x = keras.layers.Dense(128, activation="relu")(x)
        x = keras.layers.Dropout(0.2)(x)
    return keras.Model(images, keras.layers.Dense(num_classes)(x))


def make_optimizer(settings: Any, compute_dtype: str) -> tfamp.LossScaleOptimizer:
    """Returns Adam, guarded; its loss is scaled where gradients are float16.

    Without a scale it still skips what is not finite, clips and accumulates.
    """
    # Clipping acts on the update: unscaled, and the mean over all microbatches.
    adam = keras.optimizers.Adam(
        settings.learning_rate, global_clipnorm=settings.clip_norm
    )
    is_half = compute_dtype == "float16"
    return tfamp.LossScaleOptimizer(
        adam,
        initial_scale=2.0**15 if is_half else 1.0,
        dynamic=is_half,
        accumulation_steps=settings.accumulation_steps,
    )


def make_step(
    model: keras.Model, optimizer: tfamp.LossScaleOptimizer, *, jit_compile: bool
) -> Callable[[Any, Any], Any]:
    """Returns a function that learns from one microbatch and returns its loss."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = model.trainable_variables
    optimizer.build(variables)  # outside the function, which may make no variables

    @tf.function(jit_compile=jit_compile)
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, variables)  # scaled and unscaled in the tape
        # Checks and adds up; the last microbatch of a window updates.
        optimizer.apply(gradients, variables)
        return loss

    return step


def evaluate(model: keras.Model, data: Any) -> tuple[float, float]:
    """Returns the mean loss and the accuracy over all batches of `data`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    for images, labels in data:
        logits = model(images, training=False)
        mean.update_state(loss(labels, logits), sample_weight=len(labels))
        accuracy.update_state(labels, logits)
    return float(mean.result()), float(accuracy.result())


def load(settings: Any) -> tuple[Any, Any]:
    """Returns the training and test pipelines."""
    if settings.smoke:
        rng = np.random.default_rng(settings.seed)
        # Two updates: the second window is not full, and is flushed.
        num_images = (settings.accumulation_steps + 1) * settings.batch_size
        images = rng.integers(0, 256, (num_images, 8, 8, 1), np.uint8)
        labels = rng.integers(0, 10, num_images)
        arrays = tfamp.data.Pipeline.from_arrays(images, labels)
        return arrays, arrays
    builder = datasets.find("digits")
    return tuple(
        tfamp.data.Pipeline.from_tfds(builder, split) for split in ("train", "test")
    )


def build(
    settings: Any = None, *, seed: int | None = None, epochs: int | None = None
) -> tuple[keras.Model, Any, Any]:
    """Returns the model, training and test data, for the loop and `tfamp.compare`.

    A comparison trains by `fit`. The model is compiled with the loop's own optimizer,
    which scales, clips and accumulates in `fit` as it does in the loop, and `fit` too
    applies a window that is not full at the end of an epoch: the updates are the same.

    Args:
        settings: Values of the flags; None takes their defaults.
        seed: Instead of that of the settings; it decides weights and order.
        epochs: Likewise, but for this model they change nothing.
    """
    settings = reporting.resolve(define_flags, settings, seed=seed, epochs=epochs)
    keras.utils.set_random_seed(settings.seed)
    train_images, test_images = load(settings)
    train_data = (
        train_images.cache("memory")
        .shuffle(seed=settings.seed)
        .batch(settings.batch_size, drop_remainder=True)
        .prefetch()
        .build()
    )
    test_data = test_images.cache("memory").batch(256).prefetch().build()
    model = build_model()
    model.compile(
        optimizer=make_optimizer(settings, keras.config.dtype_policy().compute_dtype),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=settings.jit_compile,
    )
    return model, train_data, test_data


def train(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Trains under one policy and returns what came of it."""
    settings = reporting.resolve(define_flags, flag_values)
    status = reporting.enable(settings)
    model, train_data, test_data = build(settings)
    optimizer, epochs = model.optimizer, settings.epochs
    step = make_step(model, optimizer, jit_compile=settings.jit_compile)
    epoch_seconds = []
    for epoch in range(epochs):
        started = time.perf_counter()
        losses = [step(images, labels) for images, labels in train_data]
        optimizer.flush()  # the microbatches of a window that is not full
        # Reading a loss waits for the device, so it is done once an epoch.
        loss = float(np.mean(losses))
        epoch_seconds.append(time.perf_counter() - started)
        print(f"digits {status.policy}  epoch {epoch + 1}/{epochs}  loss {loss:.4f}")
    loss, accuracy = evaluate(model, test_data)
    num_steps = int(train_data.cardinality())
    return {
        "recipe": "custom_loop",
        "asked": settings.policy[0],
        "policy": status.policy,
        "reason": status.reason,
        "accuracy": round(accuracy, 4),
        "loss": round(loss, 4),
        "updates": optimizer.applied_steps,
        "skipped": optimizer.skipped_steps,
        "loss_scale": optimizer.scale,
        **reporting.speed(epoch_seconds, num_steps * settings.batch_size, num_steps),
        "seconds": round(sum(epoch_seconds), 2),
        "finite": reporting.is_finite(model, loss, accuracy),
        "versions": reporting.versions(),
    }


def main(argv: Sequence[str]) -> int:
    """Trains once, or once for each policy, and prints the result."""
    return reporting.run_recipe(TITLE, define_flags(), argv, train, COLUMNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
