"""Kept layers compute in float32 however the model is written and run.

Every row is judged by the operations TensorFlow traces or runs, and is shown to
fail on stock Keras.
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

layers = keras.layers
LENGTH, WIDTH = 6, 8

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


@keras.saving.register_keras_serializable("tfamp_tests")
class Erf(layers.Layer):
    """A layer of the user's own, with a weight."""

    def build(self, input_shape):
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, x):
        return tf.math.erf(x * self.gain)


@keras.saving.register_keras_serializable("tfamp_tests")
class SoftmaxInCall(layers.Layer):
    """A layer that writes softmax as an operation."""

    def call(self, x):
        return keras.ops.softmax(x, axis=-1)


@keras.saving.register_keras_serializable("tfamp_tests")
class SelfAttention(layers.Layer):
    """Calls an attention layer on one sequence."""

    def __init__(self, attention, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention

    def call(self, x):
        if isinstance(self.attention, layers.MultiHeadAttention):
            return self.attention(x, x)
        return self.attention([x, x])


@keras.saving.register_keras_serializable("tfamp_tests")
class Block(layers.Layer):
    """A composite layer whose sublayers are made in `build`."""

    def build(self, input_shape):
        self.dense = layers.Dense(input_shape[-1], activation="softsign")
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x)


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer, the rule that keeps it, and an operation found nowhere else."""

    make: Callable[[], layers.Layer]
    operation: str
    keep: Any = "default"


ROWS = {
    "own layer by class": Row(Erf, "Erf", ["default", Erf]),
    "own layer by name": Row(lambda: Erf(name="mine"), "Erf", ["default", "mine"]),
    "own layer by predicate": Row(
        Erf, "Erf", ["default", lambda layer: isinstance(layer, Erf)]
    ),
    "own layer by path": Row(
        lambda: Erf(name="mine"), "Erf", ["default", "(.*/)?mine"]
    ),
    "Dense with softmax": Row(
        lambda: layers.Dense(WIDTH, activation="softmax"), "Softmax"
    ),
    "Dense by class name": Row(
        lambda: layers.EinsumDense(
            "abc,cd->abd", (LENGTH, WIDTH), activation="softsign"
        ),
        "Softsign",
        ["default", "EinsumDense"],
    ),
    "Activation": Row(lambda: layers.Activation("softmax"), "Softmax"),
    "Softmax": Row(layers.Softmax, "Softmax"),
    "Softmax over two axes": Row(lambda: layers.Softmax(axis=(1, 2)), "Exp"),
    "softmax in call": Row(SoftmaxInCall, "Softmax"),
    "MultiHeadAttention with dropout": Row(
        lambda: SelfAttention(layers.MultiHeadAttention(2, 4, dropout=0.1)), "Softmax"
    ),
    "MultiHeadAttention, all of it": Row(
        lambda: SelfAttention(layers.MultiHeadAttention(2, 4)),
        "Einsum",
        ["default", "MultiHeadAttention"],
    ),
    "Attention": Row(
        lambda: SelfAttention(layers.Attention(use_scale=True)), "Softmax"
    ),
    "AdditiveAttention": Row(
        lambda: SelfAttention(layers.AdditiveAttention()), "Softmax"
    ),
    "LSTM": Row(
        lambda: layers.LSTM(WIDTH, return_sequences=True),
        "Tanh",
        ["default", layers.LSTM],
    ),
    "GRU": Row(
        lambda: layers.GRU(WIDTH, return_sequences=True), "Tanh", ["default", "GRU"]
    ),
    "gates of an LSTM": Row(
        lambda: layers.LSTM(WIDTH, return_sequences=True), "Sigmoid"
    ),
    "Bidirectional": Row(
        lambda: layers.Bidirectional(layers.LSTM(WIDTH // 2, return_sequences=True)),
        "Tanh",
        ["default", layers.Bidirectional],
    ),
    "LSTM inside Bidirectional": Row(
        lambda: layers.Bidirectional(layers.LSTM(WIDTH // 2, return_sequences=True)),
        "Tanh",
        ["default", layers.LSTM],
    ),
    "TimeDistributed": Row(
        lambda: layers.TimeDistributed(layers.Dense(WIDTH, activation="softsign")),
        "Softsign",
        ["default", layers.TimeDistributed],
    ),
    "Dense inside TimeDistributed": Row(
        lambda: layers.TimeDistributed(
            layers.Dense(WIDTH, activation="softsign", name="inner")
        ),
        "Softsign",
        ["default", "inner"],
    ),
    "sublayers made in build": Row(Block, "Softsign", ["default", "Block"]),
}


class Subclassed(keras.Model):
    """Adds the block's output to half-precision tensors by hand."""

    def __init__(self, make):
        super().__init__()
        self.trunk = layers.Dense(WIDTH, activation="relu")
        self.block = make()
        self.flatten = layers.Flatten()
        self.head = layers.Dense(1, activation="softplus")

    def call(self, x):
        h = self.trunk(x)
        y = self.block(h)
        h = h + y
        h = h * y
        h = tf.concat([h, y], axis=-1)
        return self.head(self.flatten(h))


def functional(make):
    x = keras.Input((LENGTH, WIDTH))
    h = layers.Dense(WIDTH, activation="relu")(x)
    h = h + make()(h)
    return keras.Model(x, layers.Dense(1, activation="softplus")(layers.Flatten()(h)))


def sequential(make):
    return keras.Sequential(
        [
            layers.Dense(WIDTH, activation="relu"),
            make(),
            layers.Flatten(),
            layers.Dense(1, activation="softplus"),
        ]
    )


def nested(make):
    inner_x = keras.Input((LENGTH, WIDTH))
    inner = keras.Model(inner_x, make()(inner_x), name="inner_model")
    x = keras.Input((LENGTH, WIDTH))
    h = layers.Dense(WIDTH, activation="relu")(x)
    h = layers.Add()([h, inner(h)])
    return keras.Model(x, layers.Dense(1, activation="softplus")(layers.Flatten()(h)))


def shared(make):
    block = make()
    x = keras.Input((LENGTH, WIDTH))
    h = layers.Dense(WIDTH, activation="relu")(x)
    h = layers.Add()([h, block(h), block(block(h))])
    return keras.Model(x, layers.Dense(1, activation="softplus")(layers.Flatten()(h)))


STRUCTURES = {
    "functional": functional,
    "sequential": sequential,
    "subclassed": Subclassed,
    "nested": nested,
    "shared": shared,
}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, LENGTH, WIDTH)).astype("float32")
    return x, rng.normal(size=(8, 1)).astype("float32")


def run(model, mode):
    """Runs `model` in one way and returns the operations it took."""
    x, y = data()
    model.compile(
        "sgd", "mse", run_eagerly=mode == "run_eagerly", jit_compile=mode == "xla"
    )
    with recorded_operations() as operations:
        if mode == "predict":
            model.predict(x, batch_size=8, verbose=0)
        else:
            model.fit(x, y, batch_size=8, verbose=0)
    return operations


def check(operations, row, half):
    """Checks the row's operation, the trunk and the head."""
    assert operations.of(row.operation) == {"float32"}
    assert operations.of("Relu") == {half}
    assert operations.of("Softplus") == {"float32"}


@pytest.mark.most(4)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_stock_keras_fails_the_row(row):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = functional(row.make)
    finally:
        keras.config.set_dtype_policy("float32")
    operations = run(model, "fit")
    assert "bfloat16" in operations.of(row.operation)
    assert "bfloat16" in operations.of("Softplus")


MODES = ("fit", "predict", "run_eagerly", "xla")


def pairs(ways):
    """Each row with two of some ways, so that each way sees most kinds of rows.

    All of them took a third of the suite's time; `test_layers_built_after_enable`
    has every row in every structure.
    """
    return [
        pytest.param(ways[way], row, id=f"{way}-{name}")
        for i, (name, row) in enumerate(ROWS.items())
        for j, way in enumerate(ways)
        if (j - 2 * i) % len(ways) < 2
    ]


# In an order in which each row gets both modes and both structures.
EAGER_AND_XLA = {
    f"{name}, {mode}": (STRUCTURES[name], mode)
    for name, mode in (
        ("functional", "run_eagerly"),
        ("subclassed", "xla"),
        ("subclassed", "run_eagerly"),
        ("functional", "xla"),
    )
}


@pytest.mark.most(8)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_layers_built_after_enable(structure, row):
    with tfamp.scope("mixed_bfloat16", keep_float32=row.keep):
        model = structure(row.make)
        check(run(model, "fit"), row, "bfloat16")
    check(run(model, "predict"), row, "bfloat16")


@pytest.mark.slow
@pytest.mark.most(4)
@pytest.mark.parametrize("structure, row", pairs(STRUCTURES))
def test_apply_on_a_trained_model(structure, row):
    x, y = data()
    model = structure(row.make)
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    model.predict(x, verbose=0)
    weights = model.get_weights()
    slots = [v.numpy() for v in model.optimizer.variables]
    tfamp.apply(model, "mixed_bfloat16", keep_float32=row.keep)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    for before, after in zip(slots, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(before, after.numpy())
    with recorded_operations() as operations:
        model.predict(x, verbose=0)
    check(operations, row, "bfloat16")
    with recorded_operations() as operations:
        model.fit(x, y, verbose=0)
    check(operations, row, "bfloat16")


@pytest.mark.slow
@pytest.mark.most(4)
@pytest.mark.parametrize("way, row", pairs(EAGER_AND_XLA))
def test_eager_and_xla_runs(way, row):
    structure, mode = way
    with tfamp.scope("mixed_bfloat16", keep_float32=row.keep):
        model = structure(row.make)
    check(run(model, mode), row, "bfloat16")


@pytest.mark.slow
@pytest.mark.most(4)
@pytest.mark.parametrize("way, row", pairs(EAGER_AND_XLA))
def test_apply_in_eager_and_xla_runs(way, row):
    structure, mode = way
    model = structure(row.make)
    model(data()[0])
    tfamp.apply(model, "mixed_bfloat16", keep_float32=row.keep)
    check(run(model, mode), row, "bfloat16")


@pytest.mark.most(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STRUCTURES)
def test_float16_alike(name, mode):
    row = ROWS["MultiHeadAttention with dropout"]
    with tfamp.scope("mixed_float16", keep_float32=row.keep):
        model = STRUCTURES[name](row.make)
    check(run(model, mode), row, "float16")
