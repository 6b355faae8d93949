"""Training steps that fail of the data or of the model itself."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.failure_making import (
    WIDTH,
    batch,
    damaged,
    failure,
    network,
    raw,
    with_part,
)


def _nan_in_x(x: Any, y: Any) -> Any:
    x[3, ..., 2] = np.nan
    return x, y


def _infinity_in_x(x: Any, y: Any) -> Any:
    x[5, ..., 0] = np.inf
    return x, y


def _nan_in_y(x: Any, y: Any) -> Any:
    y[7] = np.nan
    return x, y


def _nan_in_weight(x: Any, y: Any) -> Any:
    weight = np.ones(len(x), "float32")
    weight[2] = np.nan
    return x, y, weight


def _infinite_weight(x: Any, y: Any) -> Any:
    weight = np.ones(len(x), "float32")
    weight[4] = np.inf
    return x, y, weight


def _label_out_of_range(x: Any, y: Any) -> Any:
    y[1] = 99
    return x, y


def _huge_target(x: Any, y: Any) -> Any:
    y[6] = 1e30
    return x, y


def _huge_input(x: Any, y: Any) -> Any:
    x[6] = 1e30 * np.abs(x[6])
    return x, y


def _entered(rng: np.random.Generator) -> Any:
    """Returns a network that does not hide a huge input behind a tanh."""
    x, y = batch(rng)
    parts_of_it = [
        layers.Dense(WIDTH, activation="relu", name=f"dense_{i}") for i in range(3)
    ]
    head = layers.Dense(1, name="head")
    model = keras.Sequential([keras.Input((WIDTH,)), *parts_of_it, head])
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    return model, _huge_input(x, y)


DATA = (
    failure("nan_in_x", "data", damaged(_nan_in_x)),
    failure(
        "nan_in_x_bfloat16",
        "data",
        damaged(_nan_in_x, style="subclassed", depth=15),
        policy="mixed_bfloat16",
    ),
    failure(
        "infinity_in_x_float16",
        "data",
        damaged(_infinity_in_x, style="sequential"),
        policy="mixed_float16",
    ),
    failure(
        "nan_in_sequence",
        "data",
        damaged(_nan_in_x, kind="sequence", shape=(6, WIDTH), style="nested"),
    ),
    failure("nan_in_y", "data", damaged(_nan_in_y, style="nested", depth=15)),
    failure("nan_in_y_float16", "data", damaged(_nan_in_y), policy="mixed_float16"),
    failure("nan_in_weight", "data", damaged(_nan_in_weight)),
    failure(
        "infinite_weight_bfloat16",
        "data",
        damaged(_infinite_weight, style="subclassed"),
        policy="mixed_bfloat16",
    ),
    failure("label_out_of_range", "data", damaged(_label_out_of_range, classes=4)),
    failure("huge_target", "data", damaged(_huge_target, style="sequential")),
    failure("huge_input", "data", _entered),
)


def _root_of_zero(x: Any) -> Any:
    return ops.sqrt(ops.relu(x))


def _logarithm_of_zero(x: Any) -> Any:
    return ops.log(ops.relu(x))


def _share_of_nothing(x: Any) -> Any:
    above = ops.relu(x - 100.0)
    return x + above / ops.sum(above, axis=-1, keepdims=True)


def _logarithm_of_negative(x: Any) -> Any:
    return x * ops.log(x)


def _exponential(x: Any) -> Any:
    return ops.log1p(ops.exp(200.0 * ops.abs(x)))


def _norm_of_zero(x: Any) -> Any:
    nothing = ops.relu(x - 100.0)
    return x + ops.sqrt(ops.sum(ops.square(nothing), axis=-1, keepdims=True))


def _spoilt_weights(
    value: float, layer: str, **options: Any
) -> Callable[[np.random.Generator], Any]:
    """Returns a maker of a model of which one weight of one layer is not finite.

    A ReLU follows, which on CPUs in graph mode makes NaN 0: the loss is finite.
    """

    def make(rng: np.random.Generator) -> Any:
        fused = [
            layers.Dense(WIDTH, activation="relu", name="hidden"),
            layers.Dense(WIDTH, activation="relu", name="after"),
        ]
        model = network(fused, **options)
        for part in fused:
            if part.name == layer:
                kernel, bias = part.get_weights()
                kernel[1, 2] = value
                part.set_weights([kernel, bias])
        return model, batch(rng)

    return make


MODEL = (
    failure(
        "root_of_zero",
        "model",
        with_part(raw("root", _root_of_zero)),
        layers=["root"],
    ),
    failure(
        "root_of_zero_float16",
        "model",
        with_part(raw("root", _root_of_zero), style="subclassed", depth=15, place=3),
        policy="mixed_float16",
        layers=["root"],
    ),
    failure(
        "norm_of_zero_inside",
        "model",
        with_part(raw("norm", _norm_of_zero), style="nested"),
        layers=["inner/norm"],
    ),
    failure(
        "logarithm_of_zero",
        "model",
        with_part(raw("levels", _logarithm_of_zero), depth=15, place=4),
        layers=["levels"],
    ),
    failure(
        "logarithm_of_zero_bfloat16",
        "model",
        with_part(raw("levels", _logarithm_of_zero), style="sequential"),
        policy="mixed_bfloat16",
        layers=["levels"],
    ),
    failure(
        "share_of_nothing",
        "model",
        with_part(raw("shares", _share_of_nothing), style="nested stage"),
        layers=["stage/shares"],
    ),
    failure(
        "logarithm_of_negative",
        "model",
        with_part(raw("entropy", _logarithm_of_negative), style="subclassed"),
        layers=["entropy"],
    ),
    failure(
        "exponential",
        "model",
        with_part(raw("grow", _exponential), style="sequential", depth=15, place=2),
        layers=["grow"],
    ),
    failure(
        "nan_weight_behind_relu",
        "model",
        _spoilt_weights(np.nan, "hidden"),
        layers=["hidden"],
    ),
    failure(
        "nan_weight_behind_relu_deep",
        "model",
        _spoilt_weights(np.nan, "after", depth=15, place=3, style="sequential"),
        layers=["after"],
    ),
    failure(
        "infinite_weight_in_layer",
        "model",
        _spoilt_weights(np.inf, "hidden", style="nested"),
        policy="mixed_bfloat16",
        layers=["inner/hidden"],
    ),
)
FAILURES = (*DATA, *MODEL)
