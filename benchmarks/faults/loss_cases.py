"""Models whose added losses, small losses or heads half precision spoils."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.making import short_case
from benchmarks.faults.own_layers import (
    WIDTH,
    adding,
    around,
    dropped,
    of_model,
    of_normal,
    raw,
)
from benchmarks.faults.random_cases import RANGE, SLIPS
from benchmarks.faults.records import Case

# Losses that layers add


def _one_less_sigmoid(x: Any) -> Any:
    return -1e-2 * ops.mean(ops.log(1.0 - ops.sigmoid(x + 11.0)))


def _focal(most: float) -> Any:
    def focal(x: Any) -> Any:
        p = ops.sigmoid(most * ops.tanh(2.0 * x))
        terms = ops.square(p) * ops.log(1.0 - p) + ops.square(1.0 - p) * ops.log(p)
        return -0.1 * ops.mean(terms)

    return focal


def _squared_600(x: Any) -> Any:
    return 1e-5 * ops.mean(ops.square(x + 600.0))


def _commitment(level: float) -> Any:
    def commitment(x: Any) -> Any:
        z = x + level
        code = ops.stop_gradient(ops.round(4.0 * z) / 4.0 + 0.03)
        return 200.0 * ops.mean(ops.square(z - code))

    return commitment


def _variance(x: Any) -> Any:
    z = x + 200.0
    return ops.mean(ops.mean(ops.square(z), 0) - ops.square(ops.mean(z, 0)))


def _divergence(x: Any) -> Any:
    spread = 12.0 * x
    return 1e-5 * ops.mean(ops.exp(spread) - spread - 1.0)


def _entropy(x: Any) -> Any:
    p = ops.softmax(25.0 * x)
    return 0.1 * ops.mean(ops.sum(p * ops.log(p + 1e-10), axis=-1))


def _energy(x: Any) -> Any:
    return 1e-5 * ops.sum(ops.square(60.0 * x))


def _temperature(x: Any) -> Any:
    pairs = ops.matmul(x, ops.transpose(x)) / 0.4
    return 0.1 * ops.mean(ops.log(ops.sum(ops.exp(pairs), axis=-1)))


ADDED = tuple(
    short_case(
        f"added_{name}",
        "added loss",
        around(adding("penalty", function), style=style),
        *guilty,
        reasons=reasons,
        style=style,
    )
    for name, function, style, guilty, reasons in (
        ("log", _one_less_sigmoid, "sequential", [["penalty"]] * 2, (*SLIPS, *RANGE)),
        ("focal", _focal(12.0), "functional", [["penalty"]] * 2, (*SLIPS, *RANGE)),
        ("squares", _squared_600, "subclassed", [["penalty"]], RANGE),
        ("commitment", _commitment(500.0), "sequential", [["penalty"]] * 2, SLIPS),
        ("variance", _variance, "functional", [["penalty"]] * 2, SLIPS),
        ("divergence", _divergence, "sequential", [["penalty"]], RANGE),
        ("entropy", _entropy, "subclassed", [["penalty"]], RANGE),
        ("energy", _energy, "functional", [["penalty"]], RANGE),
        ("temperature", _temperature, "sequential", [["penalty"]], RANGE),
    )
)

# What a head can still tell apart


def _level(level: float, scale: float = 1.0) -> Any:
    """Returns what makes a head whose bias is where the targets are."""

    def last() -> list[Any]:
        kernel = keras.initializers.RandomNormal(stddev=0.35 * scale, seed=3)
        bias = keras.initializers.Constant(level)
        return [
            layers.Dense(
                3, kernel_initializer=kernel, bias_initializer=bias, name="head"
            )
        ]

    return last


def _levelled(level: float, spread: float, style: str = "sequential") -> Any:
    return around(
        raw("same", lambda x: 1.0 * x),
        style=style,
        last=_level(level, spread),
        data=of_normal(WIDTH, level=level, spread=spread),
    )


def _two_heads(level: float, spread: float) -> Any:
    def make() -> keras.Model:
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(WIDTH, activation="tanh", name="first")(inputs)
        x = layers.LayerNormalization(name="settle")(x)
        bias = keras.initializers.Constant(level)
        kernel = keras.initializers.RandomNormal(stddev=0.35 * spread, seed=3)
        far = layers.Dense(
            1, kernel_initializer=kernel, bias_initializer=bias, name="level"
        )
        return keras.Model(inputs, [layers.Dense(3, name="near")(x), far(x)])

    def data(rng: np.random.Generator) -> Any:
        x, near = of_normal(WIDTH)(rng)
        return x, (near, of_normal(WIDTH, units=1, level=level, spread=spread)(rng)[1])

    return of_model(make, data, loss=["mse", "mse"])


def _shift_last(offset: float) -> Any:
    def last() -> list[Any]:
        head = layers.Dense(3, name="head")
        return [head, layers.Rescaling(1.0, offset=offset, name="shift")]

    return around(
        raw("same", lambda x: 1.0 * x), last=last, data=of_normal(WIDTH, level=offset)
    )


HEADS = (
    short_case(
        "head_1500",
        "head",
        _levelled(1500.0, 1.0),
        ["head"],
        ["head"],
        reasons=SLIPS,
        depth=5,
    ),
    short_case(
        "head_300",
        "head",
        _levelled(300.0, 0.3, "functional"),
        ["head"],
        ["head"],
        reasons=SLIPS,
        style="functional",
        depth=5,
    ),
    short_case(
        "head_20000",
        "head",
        _levelled(20000.0, 20.0, "subclassed"),
        ["head"],
        ["head"],
        reasons=SLIPS,
        style="subclassed",
        depth=5,
    ),
    short_case(
        "two_heads",
        "head",
        _two_heads(5000.0, 3.0),
        ["level"],
        ["level"],
        reasons=SLIPS,
        style="functional",
        depth=4,
    ),
    short_case(
        "years",
        "head",
        _shift_last(2010.0),
        ["shift"],
        ["shift"],
        reasons=SLIPS,
        depth=6,
    ),
)


# Small losses


def _times(factor: float, offset: float = 0.0) -> Any:
    def loss(y: Any, predicted: Any) -> Any:
        return factor * keras.losses.mean_squared_error(y, predicted) + offset

    return loss


def _needs_scale(name: str, build: Any, style: str = "sequential") -> Case:
    empty = frozenset({frozenset[str]()})
    both = ("float16", "bfloat16")
    return Case(
        name=name,
        kind="small loss",
        build=build,
        guilty=dict.fromkeys(both, empty),
        verdict={"float16": "loss scale", "bfloat16": "safe"},
        reasons=dict.fromkeys(both, frozenset()),
        style=style,
        depth=4,
    )


SMALL = (
    _needs_scale("tiny_loss", around(raw("same", ops.tanh), loss=_times(1e-6))),
    _needs_scale(
        "tiny_loss_dropped",
        around(dropped("block", ops.tanh), loss=_times(1e-6), style="functional"),
        "functional",
    ),
    _needs_scale(
        "tiny_negative_loss", around(raw("same", ops.tanh), loss=_times(1e-6, -5.0))
    ),
)
CASES = (*ADDED, *HEADS, *SMALL)
