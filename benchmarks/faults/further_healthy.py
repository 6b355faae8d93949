"""Healthy twins of the models with randomness, added losses, fine heads and masks."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.making import short_case
from benchmarks.faults.own_layers import (
    IGNORING,
    SEQUENCE,
    WIDTH,
    Cell,
    Encoder,
    OwnAttention,
    Tied,
    Whole,
    adding,
    around,
    dropped,
    of_classes,
    of_ids,
    of_model,
    of_normal,
    raw,
)
from benchmarks.faults.records import Case


def _healthy(name: str, build: Any, style: str = "sequential", depth: int = 4) -> Case:
    return short_case(name, "healthy", build, style=style, depth=depth)


def _swish(x: Any) -> Any:
    return x * ops.sigmoid(x)


def _focal(x: Any) -> Any:
    p = ops.sigmoid(3.0 * ops.tanh(x))
    return -0.1 * ops.mean(ops.square(p) * ops.log(1.0 - p))


def _commitment(x: Any) -> Any:
    code = ops.stop_gradient(ops.round(2.0 * x) / 2.0)
    return 0.25 * ops.mean(ops.square(x - code))


def _divergence(x: Any) -> Any:
    return 0.1 * ops.mean(ops.exp(x) - x - 1.0)


class _Sampled(layers.Layer):
    """Adds noise to what it gets, as a variational autoencoder does."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed = keras.random.SeedGenerator(7)

    def call(self, mean: Any) -> Any:
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seed)
        self.add_loss(0.05 * ops.mean(ops.square(mean)))
        return mean + 0.3 * noise


def _infinite(x: Any) -> Any:
    nothing = ops.cast(ops.convert_to_tensor(-np.inf, "float32"), x.dtype)
    return x + ops.softmax(ops.where(ops.arange(WIDTH) < 6, x, nothing))


def _largest(x: Any) -> Any:
    """The largest of what is seen; where nothing is, tanh hides -1e9 or -inf."""
    far = ops.cast(ops.convert_to_tensor(-1e9, "float32"), x.dtype)
    return x + ops.tanh(ops.max(ops.where(x > 0.0, x, far), axis=-1, keepdims=True))


def _shifted_loss(y: Any, predicted: Any) -> Any:
    return keras.losses.mean_squared_error(y, predicted) - 5.0


def _table(rows: int, size: float = 1.0) -> Any:
    normal = keras.initializers.RandomNormal(stddev=size, seed=5)
    return layers.Embedding(
        rows, WIDTH, embeddings_initializer=normal, name="embedding"
    )


def _ids(rows: int, *after: Any) -> Any:
    def make() -> keras.Model:
        parts = [part() for part in after]
        inputs = keras.Input((5,), dtype="int32")
        return keras.Sequential([inputs, _table(rows), *parts, layers.Dense(3)])

    return of_model(make, of_ids(rows))


def _level(level: float) -> Any:
    bias = keras.initializers.Constant(level)
    return lambda: [layers.Dense(3, bias_initializer=bias, name="head")]


def _two_heads() -> keras.Model:
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, activation="tanh", name="first")(inputs)
    number = layers.Dense(3, name="number")(x)
    share = layers.Dense(1, activation="sigmoid", name="share")(x)
    return keras.Model(inputs, [number, share])


def _two_targets(rng: np.random.Generator) -> Any:
    x, y = of_normal(WIDTH)(rng)
    return x, (y, rng.integers(0, 2, (len(x), 1)).astype("float32"))


CASES = (
    _healthy("drop_swish", around(dropped("block", _swish))),
    _healthy(
        "drop_swish_last",
        around(dropped("block", _swish, is_last=True), style="nested"),
        "nested",
    ),
    _healthy(
        "drop_attention_scaled",
        around(lambda: [OwnAttention(0.5, name="attend")], shape=SEQUENCE),
    ),
    _healthy(
        "drop_attention_masked",
        around(lambda: [OwnAttention(0.5, -1e4, name="attend")], shape=SEQUENCE),
    ),
    _healthy(
        "attention_with_dropout",
        around(
            lambda: [Encoder(_swish, name="encoder")],
            style="functional",
            shape=SEQUENCE,
        ),
        "functional",
        7,
    ),
    _healthy(
        "whole_with_dropout",
        of_model(lambda: Whole(_swish, name="whole"), of_normal(WIDTH)),
        "subclassed",
    ),
    _healthy("noise", around(lambda: [layers.GaussianNoise(0.1)], style="functional")),
    _healthy(
        "recurrent_dropout_lstm",
        around(
            lambda: [
                layers.LSTM(
                    WIDTH, dropout=0.1, recurrent_dropout=0.2, return_sequences=True
                )
            ],
            shape=SEQUENCE,
        ),
    ),
    _healthy(
        "recurrent_dropout_gru",
        around(
            lambda: [layers.GRU(WIDTH, recurrent_dropout=0.2, return_sequences=True)],
            style="subclassed",
            shape=SEQUENCE,
        ),
        "subclassed",
    ),
    _healthy(
        "own_cell",
        around(
            lambda: [layers.RNN(Cell(_swish), return_sequences=True, name="rnn")],
            shape=SEQUENCE,
        ),
    ),
    _healthy("added_focal_bounded", around(adding("penalty", _focal))),
    _healthy(
        "added_commitment_near",
        around(adding("penalty", _commitment), style="functional"),
        "functional",
    ),
    _healthy("added_divergence_small", around(adding("penalty", _divergence))),
    _healthy(
        "added_by_activity",
        around(lambda: [layers.ActivityRegularization(l2=1e-3)], style="subclassed"),
        "subclassed",
    ),
    _healthy("sampled", around(lambda: [_Sampled(name="sampled")])),
    _healthy(
        "head_10",
        around(
            raw("same", ops.tanh),
            last=_level(10.0),
            data=of_normal(WIDTH, level=10.0, spread=3.0),
        ),
    ),
    _healthy(
        "two_usual_heads",
        of_model(_two_heads, _two_targets, loss=["mse", "binary_crossentropy"]),
        "functional",
        3,
    ),
    _healthy(
        "rows_of_a_table",
        _ids(5000, layers.GlobalAveragePooling1D, lambda: layers.Dense(8, "tanh")),
    ),
    _healthy("rows_to_lstm", _ids(900, lambda: layers.LSTM(WIDTH)), depth=3),
    _healthy(
        "tied",
        of_model(
            lambda: Tied(1.0, name="tied"),
            of_ids(40, classes=40),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ),
        "subclassed",
        3,
    ),
    _healthy("infinite_mask", around(raw("mask", _infinite))),
    _healthy(
        "infinite_mask_dropped",
        around(dropped("mask", _infinite), style="nested stage"),
        "nested",
    ),
    _healthy("largest_of_masked", around(raw("largest", _largest))),
    _healthy(
        "ignored_class",
        around(
            raw("same", ops.tanh),
            data=of_classes(WIDTH, ignored=True),
            loss=IGNORING,
        ),
    ),
    _healthy("negative_loss", around(raw("same", ops.tanh), loss=_shifted_loss)),
)
