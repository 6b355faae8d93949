"""Steps with dropout, masks, ignored classes and embeddings that fail or do not."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.failure_making import failure
from benchmarks.faults.own_layers import (
    IGNORING,
    SEQUENCE,
    WIDTH,
    OwnAttention,
    adding,
    around,
    dropped,
    of_classes,
    of_ids,
    of_model,
    raw,
)
from benchmarks.faults.random_cases import square


def _made(
    build: Callable[[int], Any], damage: Callable[[Any, Any], Any] | None = None
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of what a builder of a case builds, and its first batch."""

    def make(rng: np.random.Generator) -> Any:
        model, batches = build(int(rng.integers(1000)))
        return model, damage(*batches[0]) if damage else batches[0]

    return make


def _seen(length: int) -> Callable[[Any], Any]:
    """Returns a softmax over the first so many channels; -inf hides the others."""

    def weigh(x: Any) -> Any:
        nothing = ops.cast(ops.convert_to_tensor(-np.inf, "float32"), x.dtype)
        return x + ops.softmax(ops.where(ops.arange(WIDTH) < length, x, nothing))

    return weigh


def _classes(part: Any, **options: Any) -> Callable[[int], Any]:
    data = of_classes(WIDTH, ignored=True)
    return around(part, data=data, loss=IGNORING, **options)


def _wrong_class(x: Any, y: Any) -> Any:
    y = y.copy()
    y[1] = 77
    return x, y


def _missing(x: Any, y: Any) -> Any:
    x = x.copy()
    x[3, 2] = np.nan
    return x, y


def _logarithm(x: Any) -> Any:
    return ops.log(ops.relu(x))


def _rows(count: int) -> Callable[[int], Any]:
    def make() -> keras.Model:
        table = keras.initializers.RandomNormal(stddev=1.0, seed=2)
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(count, WIDTH, embeddings_initializer=table),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )

    return of_model(make, of_ids(count))


def _shifted(y: Any, predicted: Any) -> Any:
    return keras.losses.mean_squared_error(y, predicted) - 5.0


def _overfitted(rng: np.random.Generator) -> Any:
    """A model whose targets are what it gives, but for a hundred-thousandth."""
    model, batches = around(raw("same", ops.tanh))(int(rng.integers(1000)))
    x, _ = batches[0]
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="mse")
    return model, (x, np.asarray(model(x), "float32") + 1e-5)


_SOFTENED = {"loss_scale": 2.0**5}
FAILURES = (
    failure(
        "dropped_square",
        "precision",
        _made(around(dropped("block", square))),
        policy="mixed_float16",
        layers=["block"],
    ),
    failure(
        "dropped_mask_constant",
        "precision",
        _made(around(lambda: [OwnAttention(1.0, -1e9, name="attend")], shape=SEQUENCE)),
        policy="mixed_float16",
        layers=["attend"],
    ),
    failure(
        "square_after_infinite_mask",
        "precision",
        _made(around(lambda: [*raw("mask", _seen(6))(), *raw("square", square)()])),
        policy="mixed_float16",
        layers=["square"],
    ),
    failure(
        "square_ignoring_classes",
        "precision",
        _made(_classes(raw("square", square), style="functional")),
        policy="mixed_float16",
        layers=["square"],
    ),
    failure(
        "nothing_is_seen",
        "model",
        _made(around(raw("mask", _seen(0)))),
        layers=["mask"],
    ),
    failure(
        "nothing_is_seen_float16",
        "model",
        _made(around(raw("mask", _seen(0)), style="nested")),
        policy="mixed_float16",
        layers=["inner/mask"],
    ),
    failure(
        "dropped_logarithm",
        "model",
        _made(around(dropped("block", _logarithm), style="subclassed")),
        layers=["block"],
    ),
    failure(
        "dropped_logarithm_bfloat16",
        "model",
        _made(around(dropped("block", _logarithm))),
        policy="mixed_bfloat16",
        layers=["block"],
    ),
    failure(
        "wrong_class_beside_ignored",
        "data",
        _made(_classes(raw("same", ops.tanh)), _wrong_class),
    ),
    failure(
        "missing_under_infinite_mask",
        "data",
        _made(around(raw("mask", _seen(6)), style="functional"), _missing),
    ),
    failure("healthy_rows", "none", _made(_rows(5000))),
    failure("healthy_rows_float16", "none", _made(_rows(3000)), policy="mixed_float16"),
    failure(
        "healthy_infinite_mask",
        "none",
        _made(around(raw("mask", _seen(6)))),
        policy="mixed_float16",
        **_SOFTENED,
    ),
    failure("healthy_ignored_class", "none", _made(_classes(raw("same", ops.tanh)))),
    failure(
        "healthy_negative_loss",
        "none",
        _made(around(raw("same", ops.tanh), loss=_shifted)),
    ),
    failure("healthy_overfitted", "none", _overfitted),
    failure(
        "healthy_dropped_swish",
        "none",
        _made(around(dropped("block", lambda x: x * ops.sigmoid(x)))),
        policy="mixed_float16",
        **_SOFTENED,
    ),
    failure(
        "healthy_recurrent_dropout",
        "none",
        _made(
            around(lambda: [layers.GRU(WIDTH, recurrent_dropout=0.2)], shape=SEQUENCE)
        ),
        policy="mixed_bfloat16",
    ),
    failure(
        "healthy_added_loss",
        "none",
        _made(
            around(adding("penalty", lambda x: 1e-5 * ops.mean(ops.square(x + 600.0))))
        ),
        policy="mixed_float16",
        **_SOFTENED,
    ),
)
