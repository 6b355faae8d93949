"""Steps that fail of the loss scale or the precision alone, and steps that do not."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import layers, ops

from benchmarks.faults import parts
from benchmarks.faults.failure_making import (
    WIDTH,
    damaged,
    failure,
    raw,
    with_part,
)

LOSS_SCALE = (
    failure(
        "static_scale",
        "loss scale",
        damaged(lambda x, y: (x, y)),
        policy="mixed_float16",
        loss_scale=2.0**24,
    ),
    failure(
        "initial_scale",
        "loss scale",
        damaged(lambda x, y: (x, y), style="subclassed", depth=15),
        policy="mixed_float16",
        loss_scale_options={"initial_scale": 2.0**24},
    ),
    failure(
        "scale_of_large_loss",
        "loss scale",
        damaged(lambda x, y: (x, 1e3 * y), style="sequential"),
        policy="mixed_float16",
        loss_scale=2.0**16,
    ),
    failure(
        "scale_of_sequence",
        "loss scale",
        damaged(lambda x, y: (x, y), kind="sequence", shape=(6, WIDTH), style="nested"),
        policy="mixed_float16",
        loss_scale=2.0**24,
    ),
)


def _settled(part: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: [*part(), layers.LayerNormalization(name="settle")]


def _deviation(x: Any) -> Any:
    """A root of a variance that rounding makes negative or zero."""
    h = 300.0 + x
    mean = ops.mean(h, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(h), axis=-1, keepdims=True) - ops.square(mean)
    return x / ops.sqrt(variance)


def _small_angle(x: Any) -> Any:
    """A quotient whose divisor rounds to zero."""
    return x * 1e-4 / (1.0 - ops.cos(0.02 + 0.0 * x))


PRECISION = (
    failure(
        "cube",
        "precision",
        with_part(_settled(parts.cubic), depth=15, place=3),
        policy="mixed_float16",
        layers=["cube"],
    ),
    failure(
        "unscaled_attention",
        "precision",
        with_part(
            _settled(lambda: parts.unscaled_attention(200.0)),
            kind="sequence",
            shape=(6, WIDTH),
            style="subclassed",
        ),
        policy="mixed_float16",
        layers=["attend"],
    ),
    failure(
        "soft",
        "precision",
        with_part(_settled(parts.own_softplus), style="nested"),
        policy="mixed_float16",
        layers=["inner/soft"],
    ),
    failure(
        "mask_constant",
        "precision",
        with_part(
            _settled(parts.mask_constant),
            kind="sequence",
            shape=(6, WIDTH),
            style="sequential",
        ),
        policy="mixed_float16",
        layers=["masked"],
    ),
    failure(
        "mask_constant_nodes",
        "precision",
        with_part(_settled(parts.mask_constant_nodes)),
        policy="mixed_float16",
        layers=["far"],
    ),
    failure(
        "inverse",
        "precision",
        with_part(_settled(parts.reciprocal), style="nested stage"),
        policy="mixed_float16",
        layers=["stage/inverse"],
    ),
    failure(
        "small_angle",
        "precision",
        with_part(raw("angle", _small_angle), style="sequential"),
        policy="mixed_bfloat16",
        layers=["angle"],
    ),
    failure(
        "deviation",
        "precision",
        with_part(raw("deviation", _deviation), depth=15, place=4),
        policy="mixed_bfloat16",
        layers=["deviation"],
    ),
)


def _healthy(policy: str, style: str, **options: Any) -> Any:
    return failure(
        f"healthy_{policy}_{style}",
        "none",
        damaged(lambda x, y: (x, y), style=style, **options),
        policy=policy,
    )


NONE: Sequence[Any] = (
    _healthy("float32", "functional"),
    _healthy("mixed_bfloat16", "subclassed", depth=15),
    _healthy("mixed_float16", "sequential"),
    _healthy("float32", "nested", classes=4),
)
FAILURES = (*LOSS_SCALE, *PRECISION, *NONE)
