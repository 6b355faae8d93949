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
from tests.recorded_operations import recorded_operations
from tests.styles import Own

layers = keras.layers
LENGTH, WIDTH = 3, 8
# Loops take the longest to trace; the gates of an LSTM are in one.
UNROLLED = {"return_sequences": True, "unroll": True}

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class Erf(layers.Layer):
    """A layer of the user's own, with a weight."""

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, x):
        return tf.math.erf(x * self.gain)


class SelfAttention(layers.Layer):
    """Calls an attention layer on one sequence."""

    def __init__(self, attention, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention

    def call(self, x):
        if isinstance(self.attention, layers.MultiHeadAttention):
            return self.attention(x, x)
        return self.attention([x, x])


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
        lambda: SelfAttention(layers.MultiHeadAttention(2, 4, dropout=0.1)), "Softmax"
    ),
    "Attention": Row(
        lambda: SelfAttention(layers.Attention(use_scale=True)), "Softmax"
    ),
    "AdditiveAttention": Row(
        lambda: SelfAttention(layers.AdditiveAttention()), "Softmax"
    ),
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
        lambda: SelfAttention(layers.MultiHeadAttention(2, 4)),
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
            layers.Dense(WIDTH, activation="softsign", name="inner")
        ),
        "Softsign",
        "inner",
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


def made(group):
    return [row.make() for row in group.values()]


class Subclassed(keras.Model):
    """Adds the blocks' outputs to half-precision tensors by hand."""

    def __init__(self, blocks):
        super().__init__()
        self.trunk = layers.Dense(WIDTH, activation="relu")
        self.blocks = blocks
        self.flatten = layers.Flatten()
        self.head = layers.Dense(1, activation="softplus")

    def call(self, x):
        h = self.trunk(x)
        for block in self.blocks:
            y = block(h)
            h = h + y
            h = h * y
        return self.head(self.flatten(tf.concat([h, y], axis=-1)))


def between_trunk_and_head(middle):
    x = keras.Input((LENGTH, WIDTH))
    h = middle(layers.Dense(WIDTH, activation="relu")(x))
    return keras.Model(x, layers.Dense(1, activation="softplus")(layers.Flatten()(h)))


def added(blocks, h):
    for block in blocks:
        h = h + block(h)
    return h


def functional(blocks):
    return between_trunk_and_head(lambda h: added(blocks, h))


def sequential(blocks):
    return keras.Sequential(
        [
            layers.Dense(WIDTH, activation="relu"),
            *blocks,
            layers.Flatten(),
            layers.Dense(1, activation="softplus"),
        ]
    )


def nested(blocks):
    x = keras.Input((LENGTH, WIDTH))
    inner = keras.Model(x, added(blocks, x), name="inner_model")
    return between_trunk_and_head(lambda h: layers.Add()([h, inner(h)]))


STRUCTURES = {
    "functional": functional,
    "sequential": sequential,
    "subclassed": Subclassed,
    "nested": nested,
}
rng = np.random.default_rng(0)
X = rng.normal(size=(8, LENGTH, WIDTH)).astype("float32")
Y = rng.normal(size=(8, 1)).astype("float32")


def run(model, mode):
    """Runs `model` in one way and returns the operations it took."""
    model.compile(
        "sgd", "mse", run_eagerly=mode == "run_eagerly", jit_compile=mode == "xla"
    )
    with recorded_operations() as operations:
        if mode == "predict":
            model.predict(X, verbose=0)
        else:
            model.fit(X, Y, verbose=0)
    return operations


def check(operations, group, half):
    """Checks the rows' operations, the trunk and the head."""
    for name, row in group.items():
        assert operations.of(row.operation) == {"float32"}, name
    assert operations.of("Relu") == {half}
    assert operations.of("Softplus") == {"float32"}


grouped = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
structured = pytest.mark.parametrize("build", STRUCTURES.values(), ids=STRUCTURES)


@pytest.mark.quick("functional-*", "subclassed-softmax", "subclassed-attention")
@grouped
@structured
def test_layers_built_after_enable(build, group):
    with tfamp.scope("mixed_bfloat16", keep_float32=keep_of(group), check=None):
        model = build(made(group))
        check(run(model, "fit"), group, "bfloat16")
    with recorded_operations() as operations:
        model(X)
    check(operations, group, "bfloat16")


@pytest.mark.quick("functional-softmax")
@grouped
@pytest.mark.parametrize("build", [functional, Subclassed])
def test_apply_on_a_trained_model(build, group):
    model = build(made(group))
    model.compile(keras.optimizers.SGD(momentum=0.5), "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    weights = model.get_weights()
    slots = [v.numpy() for v in model.optimizer.variables]
    tfamp.apply(model, "mixed_bfloat16", keep_float32=keep_of(group))
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    for before, after in zip(slots, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, after.numpy())
    with recorded_operations() as operations:
        model.fit(X, Y, verbose=0)
    check(operations, group, "bfloat16")
