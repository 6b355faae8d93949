"""How a training that has failed shows it."""

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.loss_scale import stops
from tfamp.stepping.snapshots import optimizers_of, tally_of

# A scale at its floor is at fault no more after so many skips.
_STALLED_SKIPS = 8
# Of Keras's own wrapper, which has no floor.
_STOCK_MIN_SCALE = 2.0**-14
# How `tf.debugging.enable_check_numerics` words its error.
_CHECKED = ("Tensor had NaN", "Tensor had Inf", "!!! Detected Infinity or NaN")


class Sign(NamedTuple):
    """One sign of failure: "loss", "weights", "skip" or "error", and it in words."""

    kind: str
    text: str


def plain(logs: Any) -> dict[str, Any]:
    """Returns a training function's logs with numbers as Python's own.

    Reading them waits for the device, as `fit` does for its callbacks.
    """

    def number(value: Any) -> Any:
        if isinstance(value, Mapping):
            return plain(value)
        # Not `shape`, which takes ten times as long to ask a tensor for.
        is_number = isinstance(value, (float, int)) or getattr(value, "ndim", 1) == 0
        return float(value) if is_number else value

    is_named = isinstance(logs, Mapping)
    return {name: number(value) for name, value in logs.items()} if is_named else {}


def of_logs(logs: Mapping[str, Any], *, ignored: Collection[str] = ()) -> Sign | None:
    """Returns the sign where a loss or metric is NaN or inf.

    Example:
        >>> of_logs({"loss": 1.0, "auc": float("nan")})
        Sign(kind='loss', text='auc is nan')
    """
    for name, value in logs.items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            if inner := of_logs(value, ignored=ignored):
                return Sign("loss", f"{name}/{inner.text}")
        elif isinstance(value, float):
            if not math.isfinite(value):
                return Sign("loss", f"{name} is {value}")
        else:
            with contextlib.suppress(TypeError, ValueError):  # ragged, or no numbers
                if not np.all(np.isfinite(np.asarray(value, np.float64))):
                    return Sign("loss", f"{name} has values that are not finite")
    return None


def of_error(error: BaseException) -> Sign | None:
    """Returns the sign where an error of a training step says that numbers failed."""
    text = str(error) if isinstance(error, stops.LossScaleError) else None
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = stops.found_in(error.message)
        for mark in _CHECKED:
            if text is None and mark in error.message:
                return Sign("error", f"a checked tensor failed: {mark.lower()}")
    return None if text is None else Sign("error", text.split(". ")[0][:200])


def of_weights(model: keras.Model) -> Sign | None:
    """Returns the sign where a weight or moving statistic is NaN or inf.

    One sum a variable on the device, looked at once; only where that is not finite are
    the values looked at one by one, for a sum may overflow.
    """
    local = model.distribute_strategy.experimental_local_results
    parts = [
        (variable.path, part)
        for variable in model.variables
        for part in local(variable.value)
        if part.dtype.is_floating
    ]
    sums = [tf.cast(tf.reduce_sum(part), tf.float64) for _, part in parts]
    if not sums or np.isfinite(float(tf.add_n(sums))):
        return None
    for path, part in parts:
        if not bool(tf.reduce_all(tf.math.is_finite(part))):
            return Sign("weights", f"{path} holds values that are not finite")
    return None


def of_scale(model: keras.Model) -> Sign | None:
    """Returns the sign where the loss scale stands at its floor and steps are skipped.

    It reads from the device.
    """
    for optimizer in optimizers_of(model):
        if (stored := tally_of(optimizer)) is not None:
            now = stored.numbers()
            is_stuck = now.is_frozen > 0 or now.scale <= optimizer.rule.min_scale
            if is_stuck and now.streak >= _STALLED_SKIPS:
                return Sign(
                    "skip",
                    f"the loss scale stands at {now.scale:g} after "
                    f"{now.streak} skipped steps in a row",
                )
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = float(optimizer.dynamic_scale.numpy())
            if scale < _STOCK_MIN_SCALE:
                return Sign("skip", f"the loss scale has fallen to {scale:g}")
    return None


def num_updates(model: keras.Model) -> int:
    """Returns how many updates all optimizers of a model have made."""
    return sum(int(o.iterations.numpy()) for o in optimizers_of(model))
