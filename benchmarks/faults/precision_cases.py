"""Models of which layers lose digits: cancellation, resolution."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from benchmarks.faults import parts
from benchmarks.faults.building import BATCHES, Raw, assemble, compiled, head, trunk
from benchmarks.faults.making import make_case, trunk_case

_LONG = 15
_SLIPS = ("cancellation", "resolution")

CANCELLATION = (
    *(
        trunk_case(
            f"moments_{style}",
            "cancellation",
            parts.moments,
            float16=("moments",),
            bfloat16=("moments",),
            reasons=_SLIPS,
            style=style,
            depth=depth,
        )
        for style, depth in (("functional", 6), ("subclassed", 18))
    ),
    trunk_case(
        "moments_residual",
        "cancellation",
        parts.moments,
        float16=("moments",),
        bfloat16=("moments",),
        reasons=_SLIPS,
        style="sequential",
        trunk="residual",
        depth=16,
    ),
    trunk_case(
        "centre_sequential",
        "cancellation",
        parts.centre,
        float16=("offset", "centre"),
        bfloat16=("offset", "centre"),
        reasons=_SLIPS,
        style="sequential",
        depth=6,
    ),
    trunk_case(
        "centre_inside",
        "cancellation",
        parts.centre,
        float16=("offset", "centre"),
        bfloat16=("offset", "centre"),
        reasons=_SLIPS,
        style="nested",
        depth=_LONG,
    ),
    trunk_case(
        "centre_nodes",
        "cancellation",
        parts.centre_nodes,
        float16=("offset", "centre"),
        bfloat16=("offset", "centre"),
        reasons=_SLIPS,
        style="functional",
        depth=_LONG,
    ),
    trunk_case(
        "hyperbola_subclassed",
        "cancellation",
        parts.hyperbola,
        float16=("bend",),
        bfloat16=("bend",),
        reasons=_SLIPS,
        style="subclassed",
        depth=6,
    ),
    trunk_case(
        "versine_stage",
        "cancellation",
        parts.versine,
        float16=("angle",),
        bfloat16=("angle",),
        reasons=_SLIPS,
        style="nested stage",
        depth=_LONG,
    ),
)


def _lookup(size: int, low: int) -> Any:
    """Returns a builder: ids as floats go to a layer that looks them up."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, size])
        table = rng.normal(size=(size, 8)).astype("float32")

        def look_up(ids: Any) -> Any:
            rows = ops.take(ops.convert_to_tensor(table), ops.cast(ids, "int32"), 0)
            return ops.cast(ops.reshape(rows, (-1, 32)), ids.dtype)

        model = assemble(
            "functional",
            (4,),
            [Raw(look_up, name="lookup")],
            [],
            [*trunk("dense", 6, 16), *head("dense")],
        )
        ids = rng.integers(low, size - 64, (BATCHES, 16, 4))
        # Odd, which the formats cannot hold; rounded up they are still in the table.
        ids = (ids // 2 * 2 + 1).astype("float32")
        y = rng.normal(size=(BATCHES, 16, 3)).astype("float32")
        return compiled(model), list(zip(ids, y, strict=True))

    return build


def _clock(style: str, depth: int) -> Any:
    """Returns a builder: hours since a date, of which a layer takes the time of day."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, depth])

        def of_day(hours: Any) -> Any:
            turn = ops.floor(hours / 24.0)
            share = hours / 24.0 - turn
            return ops.concatenate(
                [ops.sin(6.2831853 * share), ops.cos(6.2831853 * share)], axis=-1
            )

        model = assemble(
            style,
            (2,),
            [],
            [Raw(of_day, name="clock")],
            [*trunk("dense", depth, 16), *head("dense")],
        )
        hours = rng.uniform(4e4, 6e4, (BATCHES, 16, 2)).astype("float32")
        y = rng.normal(size=(BATCHES, 16, 3)).astype("float32")
        return compiled(model), list(zip(hours, y, strict=True))

    return build


def _shifted_inputs(style: str, layer: str, mean: float, spread: float) -> Any:
    """Returns a builder: inputs far from zero go to a layer that normalises them."""

    def build(seed: int) -> Any:
        keras.utils.set_random_seed(seed)
        rng = np.random.default_rng([seed, 7])
        first = (
            layers.Normalization(mean=mean, variance=spread**2, name=layer)
            if layer == "normalization"
            else layers.BatchNormalization(name=layer)
        )
        model = assemble(
            style, (8,), [], [first], [*trunk("dense", 6, 16), *head("dense")]
        )
        x = rng.normal(mean, spread, (BATCHES, 16, 8)).astype("float32")
        y = rng.normal(size=(BATCHES, 16, 3)).astype("float32")
        return compiled(model), list(zip(x, y, strict=True))

    return build


def _both(*paths: str) -> dict[str, Any]:
    return {"float16": paths, "bfloat16": paths, "reasons": _RESOLVED}


_RESOLVED = ("resolution", "cancellation")
RESOLUTION = (
    make_case(
        "float_ids_large",
        "resolution",
        _lookup(8192, 4096),
        **_both("lookup"),
        style="functional",
        depth=8,
    ),
    make_case(
        "float_ids_small",
        "resolution",
        _lookup(1024, 512),
        bfloat16=("lookup",),
        style="functional",
        depth=8,
    ),
    make_case(
        "clock_functional",
        "resolution",
        _clock("functional", 15),
        **_both("clock"),
        style="functional",
        depth=17,
    ),
    make_case(
        "clock_inside",
        "resolution",
        _clock("nested", 6),
        **_both("inner/clock"),
        style="nested",
        depth=8,
    ),
    make_case(
        "normalization_far",
        "resolution",
        _shifted_inputs("functional", "normalization", 5e4, 10.0),
        **_both("normalization"),
        style="functional",
        depth=8,
    ),
    make_case(
        "normalization_far_inside",
        "resolution",
        _shifted_inputs("nested", "normalization", 5e3, 1.0),
        **_both("inner/normalization"),
        style="nested",
        depth=8,
    ),
    make_case(
        "batch_norm_far",
        "resolution",
        _shifted_inputs("functional", "batch_norm", 1000.0, 0.1),
        **_both("batch_norm"),
        style="functional",
        depth=8,
    ),
    trunk_case(
        "shifted_normalization_subclassed",
        "resolution",
        parts.shifted_normalization,
        **_both("offset", "batch_norm"),
        style="subclassed",
        depth=_LONG,
    ),
    trunk_case(
        "shifted_normalization_image",
        "resolution",
        parts.shifted_normalization,
        **_both("offset", "batch_norm"),
        style="sequential",
        trunk="image",
        depth=6,
        width=8,
    ),
    trunk_case(
        "positions_sequential",
        "resolution",
        parts.steps_of_position,
        float16=("positions",),
        bfloat16=("positions",),
        style="sequential",
        trunk="sequence",
        depth=_LONG,
        shape=(64, 8),
        width=8,
    ),
    trunk_case(
        "positions_stage",
        "resolution",
        parts.steps_of_position,
        float16=("positions",),
        bfloat16=("positions",),
        style="nested stage",
        trunk="sequence",
        depth=6,
        shape=(64, 8),
        width=8,
    ),
    trunk_case(
        "stale_average",
        "resolution",
        parts.stale_average,
        float16=("average",),
        bfloat16=("average",),
        reasons=("resolution", "accumulation", "cancellation"),
        style="subclassed",
        depth=6,
    ),
)
CASES = (*CANCELLATION, *RESOLUTION)
