"""Kept layers compute in float32 however the model is written and run.

Every row is judged by the operations TensorFlow traces or runs, and is shown to
fail on stock Keras. Rows of a group share a model, where tracing costs most; an
operation belongs to one row of it, or to rows that one rule keeps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.recorded_operations import recorded_operations
from tests.styles import Own, assembled

layers = keras.layers
LENGTH, WIDTH = 3, 8
# Loops take the longest to trace; the gates of an LSTM are in one.
UNROLLED = {"return_sequences": True, "unroll": True}


class Erf(layers.Layer):
    """A layer of the user's own, with a weight."""

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, x):
        return tf.math.erf(x * self.gain)


def on_itself(attention):
    """Returns a layer that calls an attention layer on one sequence."""
    if isinstance(attention, layers.MultiHeadAttention):
        return Own(lambda attention, x: attention(x, x), attention)
    return Own(lambda attention, x: attention([x, x]), attention)


class Block(layers.Layer):
    """A composite layer whose sublayers are made in `build`."""

    def build(self, input_shape):
        self.dense = layers.Dense(input_shape[-1], activation="selu")
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x)


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer that keeps its shape, an operation of it, and the rule that keeps it."""

    make: Callable[[], layers.Layer]
    operation: str
    keep: Any = "default"


SOFTMAX = {
    "Dense with softmax": Row(
        lambda: layers.Dense(WIDTH, activation="softmax"), "Softmax"
    ),
    "Activation": Row(lambda: layers.Activation("softmax"), "Softmax"),
    "Softmax": Row(layers.Softmax, "Softmax"),
    "softmax in call": Row(lambda: Own(keras.ops.softmax), "Softmax"),
}
ATTENTION = {
    "MultiHeadAttention with dropout": Row(
        lambda: on_itself(layers.MultiHeadAttention(2, 4, dropout=0.1)), "Softmax"
    ),
    "Attention": Row(lambda: on_itself(layers.Attention(use_scale=True)), "Softmax"),
    "AdditiveAttention": Row(lambda: on_itself(layers.AdditiveAttention()), "Softmax"),
    "gates of an LSTM": Row(
        lambda: layers.LSTM(WIDTH, return_sequences=True), "Sigmoid"
    ),
}
CHOSEN = {
    "own layer by class": Row(Erf, "Erf", Erf),
    "own layer by name": Row(lambda: Own(tf.math.erfc, name="mine"), "Erfc", "mine"),
    "own layer by path": Row(
        lambda: Own(tf.math.cosh, name="far"), "Cosh", "(.*/)?far"
    ),
    "Dense by class name": Row(
        lambda: layers.EinsumDense(
            "abc,cd->abd", (LENGTH, WIDTH), activation="softsign"
        ),
        "Softsign",
        "EinsumDense",
    ),
    "MultiHeadAttention, all of it": Row(
        lambda: on_itself(layers.MultiHeadAttention(2, 4)),
        "Einsum",
        "MultiHeadAttention",
    ),
    "Bidirectional": Row(
        lambda: layers.Bidirectional(layers.SimpleRNN(WIDTH // 2, **UNROLLED)),
        "Tanh",
        layers.Bidirectional,
    ),
    "sublayers made in build": Row(Block, "Selu", "Block"),
}
INSIDE = {
    "LSTM": Row(lambda: layers.LSTM(WIDTH, **UNROLLED), "Tanh", layers.LSTM),
    "LSTM inside Bidirectional": Row(
        lambda: layers.Bidirectional(
            layers.LSTM(WIDTH // 2, activation="elu", **UNROLLED)
        ),
        "Elu",
        layers.LSTM,
    ),
    "Dense inside TimeDistributed": Row(
        lambda: layers.TimeDistributed(
            layers.Dense(WIDTH, activation="softsign", name="sharp")
        ),
        "Softsign",
        "sharp",
    ),
}
GROUPS = {
    "softmax": SOFTMAX,
    "attention": ATTENTION,
    "chosen": CHOSEN,
    "inside others": INSIDE,
}


def keep_of(group):
    """Returns the rules that keep the layers of a group."""
    return ["default", *(r.keep for r in group.values() if r.keep != "default")]


class Adding(keras.Model):
    """Adds the blocks' outputs to half-precision tensors by hand."""

    def __init__(self, trunk, *blocks):
        super().__init__()
        *self.blocks, self.flatten, self.head = blocks
        self.trunk = trunk

    def call(self, x):
        h = self.trunk(x)
        for block in self.blocks:
            y = block(h)
            h = h + y
            h = h * y
        return self.head(self.flatten(tf.concat([h, y], axis=-1)))


STYLES = ("functional", "sequential", "subclassed", "nested")
rng = np.random.default_rng(0)
X = rng.normal(size=(8, LENGTH, WIDTH)).astype("float32")
Y = rng.normal(size=(8, 1)).astype("float32")


def made(style, group):
    """Returns a model with the layers of a group between a trunk and a head."""
    trunk = layers.Dense(WIDTH, activation="relu")
    end = layers.Flatten(), layers.Dense(1, activation="softplus")
    parts = [trunk, *(row.make() for row in group.values()), *end]
    if style == "subclassed":
        return Adding(*parts)
    return assembled(parts, style, (LENGTH, WIDTH))


def check_fit(model, group):
    """Trains, and checks the operations of the rows, the trunk and the head."""
    with recorded_operations() as operations:
        model.fit(X, Y, verbose=0)
    check(operations, group)


def check(operations, group):
    for name, row in group.items():
        assert operations.of(row.operation) == {"float32"}, name
    assert operations.of("Relu") == {"bfloat16"}
    assert operations.of("Softplus") == {"float32"}


grouped = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


@pytest.mark.quick("functional-softmax", "functional-inside others")
@grouped
@pytest.mark.parametrize("style", STYLES)
def test_layers_built_after_enable(style, group):
    with tfamp.scope("mixed_bfloat16", keep_float32=keep_of(group), check=None):
        model = made(style, group)
        model.compile("sgd", "mse", jit_compile=False)
        check_fit(model, group)
    with recorded_operations() as operations:
        model(X)
    check(operations, group)


@pytest.mark.quick("functional-softmax")
@grouped
@pytest.mark.parametrize("style", ["functional", "subclassed"])
def test_apply_on_a_trained_model(style, group):
    model = made(style, group)
    model.compile(keras.optimizers.SGD(momentum=0.5), "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    weights = model.get_weights()
    slots = [v.numpy() for v in model.optimizer.variables]
    tfamp.apply(model, "mixed_bfloat16", keep_float32=keep_of(group))
    assert_close(model, weights)
    assert_close([v.numpy() for v in model.optimizer.variables], slots)
    check_fit(model, group)
