"""Programs that used Keras's mixed precision, as stock Keras and as tfamp runs them.

Nothing of tfamp is imported here: `python -m tests.wild.old_lines '[["fit", "100"]]'`
prints what stock Keras makes of these programs, as JSON.
"""

import dataclasses
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

STEPS = 3  # of a loss of usual size, and as many of one that float16 has no bits for
RATE, TINY = 0.1, 1e-6
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = np.tanh(x @ np.array([[0.5], [1.0], [-0.5], [0.25]], "float32"))


@dataclasses.dataclass(frozen=True)
class Lines:
    """What a program says of mixed precision, from before it was told of tfamp.

    Args:
        wraps: It makes a `keras.optimizers.LossScaleOptimizer` itself.
        scales: It calls `optimizer.scale_loss` where it computes gradients itself.
        float32_head: Its last layer has `dtype="float32"`.
        sets_policy: It sets the global policy behind `tfamp.enable`.
    """

    wraps: bool = False
    scales: bool = False
    float32_head: bool = False
    sets_policy: bool = False


LINES = {
    "no line": Lines(),
    "policy": Lines(sets_policy=True),
    "head": Lines(float32_head=True),
    "scale_loss": Lines(scales=True),
    "wrapper": Lines(wraps=True),
    "wrapper and scale_loss": Lines(wraps=True, scales=True),
    "all but scale_loss": Lines(wraps=True, float32_head=True, sets_policy=True),
    "all": Lines(wraps=True, scales=True, float32_head=True, sets_policy=True),
}


class OwnStep(keras.Model):
    """Has a training step as the guides write it."""

    scales = False

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
            scaled = self.optimizer.scale_loss(loss) if self.scales else loss
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


def network(lines: Lines, kind: type = keras.Model) -> keras.Model:
    """A regression of two layers, with the same weights in every program."""
    keras.utils.set_random_seed(2)
    random.seed(2)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    dtype = "float32" if lines.float32_head else None
    return kind(inputs, keras.layers.Dense(1, dtype=dtype)(hidden))


def error_of(model: keras.Model) -> float:
    """The mean squared error over all examples."""
    return float(np.mean((y - model(x).numpy().astype("float64")) ** 2))


def squares(factor: Any) -> Callable[[Any, Any], Any]:
    """A loss function whose value is multiplied by a factor that may change."""

    def loss(targets: Any, outputs: Any) -> Any:
        difference = tf.cast(targets, "float32") - tf.cast(outputs, "float32")
        return tf.cast(factor, "float32") * tf.reduce_mean(tf.square(difference))

    return loss


def compiled(model: keras.Model, optimizer: Any, loss: Any = "mse") -> None:
    model.compile(optimizer, loss, jit_compile=False)


def by_fit(model: keras.Model, optimizer: Any, lines: Lines) -> None:
    """Trains by `fit`, the second half on a loss a million times smaller."""
    factor = tf.Variable(1.0, trainable=False)
    compiled(model, optimizer, squares(factor))
    model.scales = lines.scales
    for size in (1.0, TINY):
        factor.assign(size)
        optimizer.learning_rate = RATE / size
        model.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0)


def by_loop(
    model: keras.Model,
    optimizer: Any,
    lines: Lines,
    decorate: Callable[..., Any] = lambda step: step,
) -> None:
    """Trains by a loop of its own, as `by_fit` does."""

    @decorate
    def step(inputs: Any, targets: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = squares(factor)(targets, model(inputs, training=True))
            scaled = optimizer.scale_loss(loss) if lines.scales else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    inputs, targets = tf.constant(x), tf.constant(y)
    for size in (1.0, TINY):
        optimizer.learning_rate = RATE / size
        for _ in range(STEPS):
            step(inputs, targets, tf.constant(size))


def in_graph(model: keras.Model, optimizer: Any, lines: Lines) -> None:
    by_loop(model, optimizer, lines, tf.function)


def in_graph_built(model: keras.Model, optimizer: Any, lines: Lines) -> None:
    optimizer.build(model.trainable_variables)
    by_loop(model, optimizer, lines, tf.function)


def after_compile(train: Callable[..., None]) -> Callable[..., None]:
    """A loop of a model that was compiled with the same optimizer."""

    def trained(model: keras.Model, optimizer: Any, lines: Lines) -> None:
        compiled(model, optimizer)
        train(model, optimizer, lines)

    return trained


def after_fit(model: keras.Model, optimizer: Any, lines: Lines) -> None:
    """A loop that goes on where `fit` ended, after steps that change nothing."""
    compiled(model, optimizer)
    optimizer.learning_rate = 0.0
    model.fit(x, y, batch_size=len(x), verbose=0)
    by_loop(model, optimizer, lines)


WAYS: dict[str, tuple[type, Callable[..., None]]] = {
    "fit": (keras.Model, by_fit),
    "train_step": (OwnStep, by_fit),
    "eager loop": (keras.Model, by_loop),
    "graph loop": (keras.Model, in_graph),
    "built graph loop": (keras.Model, in_graph_built),
    "eager loop of a compiled model": (keras.Model, after_compile(by_loop)),
    "graph loop of a compiled model": (keras.Model, after_compile(in_graph)),
    "built graph loop of a compiled model": (
        keras.Model,
        after_compile(in_graph_built),
    ),
    "eager loop after fit": (keras.Model, after_fit),
}


def run(way: str, lines: Lines) -> float:
    """Trains by a program; returns the error that is left."""
    kind, train = WAYS[way]
    model = network(lines, kind)
    optimizer: Any = keras.optimizers.SGD(RATE)
    if lines.wraps:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    train(model, optimizer, lines)
    return error_of(model)


def main() -> None:
    """Prints the errors of stock Keras, in float32 and in float16."""
    found: dict[str, dict[str, float]] = {}
    for way, key in json.loads(sys.argv[1]):
        if way not in found:
            keras.config.set_dtype_policy("float32")
            found[way] = {"float32": run(way, Lines())}
        keras.mixed_precision.set_global_policy("mixed_float16")
        found[way][key] = run(way, Lines(*(flag == "1" for flag in key)))
    json.dump(found, sys.stdout)


def key_of(lines: Lines) -> str:
    """What stock Keras sees of the lines: in it the policy is always set."""
    return f"{lines.wraps:d}{lines.scales:d}{lines.float32_head:d}"


if __name__ == "__main__":
    main()
