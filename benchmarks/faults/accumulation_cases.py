"""Models of which a sum over thousands of terms stops growing."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults.building import BATCHES, Raw, assemble, compiled, head, trunk
from benchmarks.faults.making import make_case


def _long_series(first: Any, rest_depth: int, style: str, *, level: float) -> Any:
    """Returns a builder: a layer that pools 8192 steps, then a trunk."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, rest_depth])
        elements = first()
        model = assemble(
            style,
            (8192, 4),
            [],
            elements,
            [
                layers.Flatten(name="flat"),
                # To size one, for what comes after is to be healthy.
                layers.Rescaling(3.0 / level, offset=-3.0, name="scaled"),
                *trunk("dense", rest_depth, 16),
                *head("dense"),
            ],
        )
        levels = rng.uniform(0.5, 1.5, (BATCHES, 8, 1, 4))
        noise = rng.uniform(-0.3, 0.3, (BATCHES, 8, 8192, 4))
        x = (level * (levels + noise)).astype("float32")
        y = rng.normal(size=(BATCHES, 8, 3)).astype("float32")
        return compiled(model), list(zip(x, y, strict=True))

    return build


def _masked_mean() -> list[Any]:
    return [
        layers.Masking(-1.0, name="masking"),
        layers.GlobalAveragePooling1D(name="mean"),
    ]


def _last_of_sum() -> list[Any]:
    def mean(x: Any) -> Any:
        return ops.cumsum(x, axis=1)[:, -1] / 8192.0

    return [Raw(mean, name="mean")]


def _average_pooling() -> list[Any]:
    return [layers.AveragePooling1D(8192, name="mean")]


def _sum_of_all() -> list[Any]:
    return [Raw(lambda x: ops.sum(x, axis=1) / 8192.0, name="mean")]


def _running() -> list[Any]:
    total = Raw(lambda x: ops.cumsum(x, axis=1) / 8192.0, name="running")
    return [total, layers.GlobalAveragePooling1D(name="mean")]


_SUMS = ("accumulation", "overflow", "resolution")
CASES = (
    make_case(
        "cumulative_mean",
        "accumulation",
        _long_series(_last_of_sum, 6, "functional", level=1.0),
        float16=("mean",),
        bfloat16=("mean",),
        reasons=_SUMS,
        style="functional",
        depth=10,
    ),
    make_case(
        "cumulative_mean_inside",
        "accumulation",
        _long_series(_last_of_sum, 15, "nested", level=1.0),
        float16=("inner/mean",),
        bfloat16=("inner/mean",),
        reasons=_SUMS,
        style="nested",
        depth=19,
    ),
    make_case(
        "masked_mean",
        "accumulation",
        _long_series(_masked_mean, 6, "functional", level=10.0),
        float16=("mean",),
        reasons=_SUMS,
        style="functional",
        depth=11,
    ),
    make_case(
        "average_pooling",
        "accumulation",
        _long_series(_average_pooling, 6, "sequential", level=3.0),
        float16=("mean",),
        reasons=_SUMS,
        style="sequential",
        depth=10,
    ),
    make_case(
        "sum_of_all",
        "accumulation",
        _long_series(_sum_of_all, 15, "subclassed", level=5.0),
        float16=("mean",),
        reasons=_SUMS,
        style="subclassed",
        depth=19,
    ),
    make_case(
        "running_mean",
        "accumulation",
        _long_series(_running, 6, "sequential", level=1.0),
        float16=("running",),
        bfloat16=("running",),
        reasons=_SUMS,
        style="sequential",
        depth=11,
    ),
)
