"""Models of embeddings and masks that half precision spoils."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.making import short_case
from benchmarks.faults.own_layers import (
    IGNORING,
    SEQUENCE,
    WIDTH,
    OwnAttention,
    Tied,
    around,
    of_classes,
    of_ids,
    of_model,
    raw,
)
from benchmarks.faults.random_cases import RANGE, SLIPS, length, square

# Embeddings


def _embedded(rows: int, part: Any, *, level: float = 0.0, size: float = 1.0) -> Any:
    """Returns a builder: ids, their rows, a part, a normalization and a head."""

    def make() -> keras.Model:
        table = keras.initializers.RandomNormal(mean=level, stddev=size, seed=5)
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(
                    rows, WIDTH, embeddings_initializer=table, name="embedding"
                ),
                *part(),
                layers.LayerNormalization(name="settle"),
                layers.Flatten(name="flat"),
                layers.Dense(3, name="head"),
            ]
        )

    return of_model(make, of_ids(rows))


def _hashed(rows: int) -> Any:
    class Hash(layers.Layer):
        """Ids times 31, modulo the rows, in the layer's own dtype."""

        def call(self, ids: Any) -> Any:
            numbers = ops.cast(ids, self.compute_dtype) * 31.0
            numbers = numbers - ops.floor(numbers / rows) * rows
            return ops.cast(numbers, self.compute_dtype) / rows

    def make() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                Hash(name="hash"),
                layers.Dense(WIDTH, activation="tanh", name="mix"),
                layers.Dense(3, name="head"),
            ]
        )

    return of_model(make, of_ids(5000))


EMBEDDINGS = (
    short_case(
        "embedding_huge",
        "embedding",
        _embedded(60, lambda: [layers.Rescaling(1e-6, name="back")], size=1e6),
        ["embedding", "back"],
        reasons=RANGE,
        depth=3,
    ),
    short_case(
        "embedding_far",
        "embedding",
        _embedded(
            60,
            lambda: [layers.Rescaling(1.0, offset=-3000.0, name="near")],
            level=3000.0,
        ),
        ["embedding", "near"],
        ["embedding", "near"],
        reasons=SLIPS,
        depth=3,
    ),
    short_case(
        "bag_of_rows",
        "embedding",
        _embedded(60, raw("bag", lambda x: ops.cumsum(x * 4e4, axis=1) / 4e4)),
        ["bag"],
        reasons=RANGE,
    ),
    short_case(
        "cosine_of_rows",
        "embedding",
        _embedded(2000, raw("cosine", length)),
        ["cosine"],
        reasons=RANGE,
    ),
    short_case(
        "tied_large",
        "embedding",
        of_model(lambda: Tied(300.0, name="tied"), of_ids(40, classes=40), IGNORING),
        ["tied"],
        reasons=RANGE,
        style="subclassed",
        depth=3,
    ),
    short_case(
        "hashed_ids",
        "embedding",
        _hashed(977),
        ["hash"],
        ["hash"],
        reasons=SLIPS,
        depth=3,
    ),
)

# Masks and classes that are left out


def _far(x: Any) -> Any:
    """-1e9, by way of float32, so that NumPy does not warn of what is meant."""
    return ops.cast(ops.convert_to_tensor(-1e9, "float32"), x.dtype)


def _masked_mean(x: Any) -> Any:
    used = ops.cast(x > 0.5, x.dtype)
    return x + ops.sum(used * x, 1, keepdims=True) / (
        ops.sum(used, 1, keepdims=True) + 1e-9
    )


def _masked_levels(x: Any) -> Any:
    seen = ops.cast(ops.arange(WIDTH) < 6, x.dtype)
    share = ops.softmax(x * seen + (ops.cast(ops.arange(WIDTH) >= 6, x.dtype)) * -30.0)
    return x + 0.1 * ops.log(share + 1e-12)


def _infinite(x: Any) -> Any:
    nothing = ops.cast(ops.convert_to_tensor(-np.inf, "float32"), x.dtype)
    return x + ops.softmax(ops.where(ops.arange(WIDTH) < 6, x, nothing))


MASKS = (
    short_case(
        "drop_mask",
        "mask",
        around(lambda: [OwnAttention(1.0, -1e9, name="attend")], shape=SEQUENCE),
        ["attend"],
        reasons=RANGE,
    ),
    short_case(
        "empty_mean",
        "mask",
        around(raw("mean", _masked_mean), style="functional"),
        ["mean"],
        reasons=RANGE,
        style="functional",
    ),
    short_case(
        "log_of_masked",
        "mask",
        around(raw("levels", _masked_levels), style="subclassed"),
        ["levels"],
        reasons=RANGE,
        style="subclassed",
    ),
    short_case(
        "square_ignoring",
        "mask",
        around(
            raw("square", square),
            data=of_classes(WIDTH, ignored=True),
            loss=IGNORING,
        ),
        ["square"],
        reasons=RANGE,
    ),
    short_case(
        "infinite_mask_then_square",
        "mask",
        around(lambda: [*raw("mask", _infinite)(), *raw("square", square)()]),
        ["square"],
        reasons=RANGE,
        depth=5,
    ),
)
CASES = (*EMBEDDINGS, *MASKS)
