"""Trains a small causal transformer to predict the next character of Python code.

Data: the Python standard library's own source files, about 4 MB of text, a tenth
of the files for validation; no network needed.
Command: python recipes/train_text.py
         python recipes/train_text.py --policy=auto,float32   (side by side)
         python recipes/train_text.py --compare=3    (is it as good, and faster?)
Time: 1.5 to 3 minutes on 2 CPU cores, by what else they do.
Expect: about 2.1 bits per character on files it never saw, under either policy.
"""

import math
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

# A character is a byte of UTF-8: no vocabulary to build, save or get wrong.
NUM_CHARACTERS = 256
TITLE = "Next characters of Python code"
COLUMNS = {
    "bits_per_character": ("bits/char", ".3f"),
    "accuracy": ("accuracy", ".4f"),
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
        "stdlib_text",
        "stdlib_text, or any TFDS name with a feature 'text': tiny_shakespeare.",
        flag_values=values,
    )
    flags.DEFINE_integer("epochs", 1, "Passes over the data.", flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "Windows in a batch.", flag_values=values)
    flags.DEFINE_float("learning_rate", 3e-3, "At its peak.", flag_values=values)
    flags.DEFINE_integer("window", 128, "Characters it looks at.", flag_values=values)
    flags.DEFINE_integer("width", 128, "Size of its vectors.", flag_values=values)
    flags.DEFINE_integer("num_layers", 2, "Transformer blocks.", flag_values=values)
    flags.DEFINE_integer("num_heads", 4, "Attention heads.", flag_values=values)
    return values


class Position(keras.layers.Layer):
    """Adds a trained vector for each position to `(batch, window, width)`."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the table of `(window, width)`."""
        self.table = self.add_weight(
            shape=input_shape[1:], initializer="random_normal", name="table"
        )

    def call(self, inputs: Any) -> Any:
        """Returns inputs plus positions, in the compute dtype."""
        return inputs + keras.ops.cast(self.table, inputs.dtype)


def build_model(
    window: int,
    width: int,
    num_layers: int,
    num_heads: int,
    learning_rate: Any = 3e-3,
    inject: str | None = None,
    accumulation_steps: int = 1,
) -> keras.Model:
    """Returns the compiled model: uint8 characters to logits of the next ones."""
    characters = keras.Input((window,), dtype="uint8")
    x = keras.layers.Embedding(NUM_CHARACTERS, width)(characters)
    x = Position()(x)
    for _ in range(num_layers):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(num_heads, width // num_heads)
        x = x + attention(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(normed)
        x = x + keras.layers.Dense(width)(hidden)
    x = injecting.layer(inject, x)
    x = keras.layers.LayerNormalization()(x)
    logits = keras.layers.Dense(NUM_CHARACTERS)(x)
    model = keras.Model(characters, logits)
    model.compile(
        optimizer=fitting_in_memory.accumulating(
            keras.optimizers.Adam(learning_rate, beta_2=0.99, clipnorm=1.0),
            accumulation_steps,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def cut_windows(text: bytes, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets `(windows, window)`, uint8; targets are one ahead.

    Example:
        >>> inputs, targets = cut_windows(b"abcdefgh", window=3)
        >>> [row.tobytes() for row in inputs], [row.tobytes() for row in targets]
        ([b'abc', b'def'], [b'bcd', b'efg'])
    """
    characters = np.frombuffer(text, np.uint8)
    num_windows = (len(characters) - 1) // window
    if num_windows < 1:
        raise ValueError(
            f"The text has {len(characters)} characters; expected more than one window "
            f"of {window}. Choose another `--dataset` or a smaller `--window`."
        )
    used = num_windows * window
    inputs = characters[:used].reshape(num_windows, window)
    return inputs, characters[1 : used + 1].reshape(num_windows, window)


def load(settings: Any) -> tuple[Any, Any]:
    """Returns the pipelines of training and validation windows."""
    if settings.smoke:
        rng = np.random.default_rng(settings.seed)
        num_characters = 2 * settings.batch_size * settings.window + 1
        texts = [rng.integers(32, 127, num_characters, np.uint8).tobytes()] * 2
    else:
        builder = datasets.find(settings.dataset)
        validation = datasets.evaluation_split(builder)
        texts = [read_text(builder, split) for split in ("train", validation)]
    train, validation = (
        tfamp.data.Pipeline.from_arrays(*cut_windows(text, settings.window))
        for text in texts
    )
    return train, validation


def read_text(builder: Any, split: str) -> bytes:
    """Returns a split's texts one after the other, as UTF-8."""
    if "text" not in builder.info.features:
        raise ValueError(
            f"Dataset {builder.name!r} has the features "
            f"{tuple(builder.info.features)}; expected 'text' among them. Choose "
            "another `--dataset`."
        )
    files = tfamp.data.Pipeline.from_tfds(builder, split, as_supervised=False)
    return b"\n".join(example["text"].numpy() for example in files.build())


def build(
    settings: Any = None, *, seed: int | None = None, epochs: int | None = None
) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model, training and validation data for `tfamp.compare`.

    Args:
        settings: Values of the flags; None takes their defaults.
        seed: Instead of that of the settings; it decides weights and order.
        epochs: Likewise; the learning rate falls over so many.
    """
    settings = reporting.resolve(define_flags, settings, seed=seed, epochs=epochs)
    keras.utils.set_random_seed(settings.seed)
    train_windows, validation_windows = load(settings)
    train_data = (
        train_windows.shuffle(seed=settings.seed)
        .batch(settings.batch_size, drop_remainder=True)
        .prefetch()
        .build()
    )
    train_data = injecting.batches(settings.inject, train_data)
    validation_data = validation_windows.batch(settings.batch_size).prefetch().build()
    num_updates = fitting_in_memory.num_updates(
        int(train_data.cardinality()), settings.accumulation_steps
    )
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        settings.epochs * num_updates,
        warmup_target=injecting.learning_rate(settings),
        warmup_steps=min(100, num_updates),
    )
    model = build_model(
        settings.window,
        settings.width,
        settings.num_layers,
        settings.num_heads,
        schedule,
        settings.inject,
        settings.accumulation_steps,
    )
    model.jit_compile = settings.jit_compile
    return model, train_data, validation_data


def train(flag_values: flags.FlagValues) -> dict[str, Any]:
    """Trains under one policy and returns what came of it."""
    settings = reporting.resolve(define_flags, flag_values)
    status = reporting.enable(settings)
    injecting.announce(settings)
    settings, memory = fitting_in_memory.fitted(settings, build)
    model, train_data, validation_data = build(settings)
    progress = TrainingProgress(f"text {status.policy}")
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
    loss, accuracy = model.evaluate(validation_data, verbose=0)
    num_steps = int(train_data.cardinality())
    num_examples = num_steps * settings.batch_size
    return {
        "recipe": "train_text",
        "asked": settings.policy[0],
        "policy": status.policy,
        "reason": status.reason,
        "bits_per_character": round(loss / math.log(2), 4),
        # A fault on purpose may make a loss of which no float holds the exponential.
        "perplexity": round(math.exp(min(loss, 700.0)), 4),
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
