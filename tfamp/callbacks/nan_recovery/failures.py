"""How a training that has failed shows it."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.loss_scale import interface
from tfamp.stepping.snapshots import (
    optimizers_of,
    tally_of,
)

# A scale at its floor is at fault no more after so many skips.
STALLED_SKIPS = 8
# Of Keras's own wrapper, which has no floor.
_STOCK_MIN_SCALE = 2.0**-14
# How `tf.debugging.enable_check_numerics` words its error.
_CHECKED = ("Tensor had NaN", "Tensor had Inf", "!!! Detected Infinity or NaN")


@dataclasses.dataclass(frozen=True)
class Sign:
    """One sign of failure.

    Attributes:
        kind: "logs", "weights" or "loss scale".
        text: What was seen, for people.
    """

    kind: str
    text: str


def plain(logs: Any) -> dict[str, Any]:
    """Returns a training function's logs with numbers as Python's own.

    Reading them waits for the device, as `fit` does for its callbacks.
    """
    if not isinstance(logs, Mapping):
        return {}
    return {name: _plain(value) for name, value in logs.items()}


def of_logs(logs: Mapping[str, Any], *, ignored: Collection[str] = ()) -> Sign | None:
    """Returns the sign where a loss or metric is NaN or inf.

    Example:
        >>> of_logs({"loss": 1.0, "auc": float("nan")})
        Sign(kind='logs', text='auc is nan')
        >>> of_logs({"loss": 1.0, "auc": float("nan")}, ignored=["auc"]) is None
        True
    """
    for name, value in logs.items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            inner = of_logs(value, ignored=ignored)
            if inner is not None:
                return Sign(inner.kind, f"{name}/{inner.text}")
        elif isinstance(value, float):
            if not math.isfinite(value):
                return Sign("logs", f"{name} is {value}")
        elif _has_nonfinite(value):
            return Sign("logs", f"{name} has values that are not finite")
    return None


def of_error(error: BaseException) -> Sign | None:
    """Returns the sign where an error of a training step says that numbers failed."""
    if isinstance(error, interface.LossScaleError):
        return Sign("loss scale", _first_sentence(str(error)))
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = interface.found_in(error.message)
        if text is not None:
            return Sign("loss scale", _first_sentence(text))
        for mark in _CHECKED:
            if mark in error.message:
                return Sign("logs", f"a checked tensor failed: {mark.lower()}")
    return None


def of_weights(model: keras.Model) -> Sign | None:
    """Returns the sign where a weight or moving statistic is NaN or inf.

    One sum a variable on the device, looked at once; only where that is not finite are
    the values looked at one by one, for a sum may overflow.
    """
    strategy = model.distribute_strategy
    sums, parts = [], []
    for variable in model.variables:
        for part in strategy.experimental_local_results(variable.value):
            if not part.dtype.is_floating:
                continue
            parts.append((variable.path, part))
            sums.append(tf.cast(tf.reduce_sum(part), tf.float64))
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
        stored = tally_of(optimizer)
        if stored is not None:
            now = stored.numbers()
            is_stuck = now.is_frozen > 0 or now.scale <= optimizer.rule.min_scale
            if is_stuck and now.streak >= STALLED_SKIPS:
                return Sign(
                    "loss scale",
                    f"the loss scale stands at {now.scale:g} after "
                    f"{now.streak} skipped steps in a row",
                )
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = float(optimizer.dynamic_scale.numpy())
            if scale < _STOCK_MIN_SCALE:
                return Sign("loss scale", f"the loss scale has fallen to {scale:g}")
    return None


def num_updates(model: keras.Model) -> int:
    """Returns how many updates all optimizers of a model have made."""
    return sum(int(o.iterations.numpy()) for o in optimizers_of(model))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    # Not `shape`, which takes ten times as long to ask a tensor for.
    is_number = isinstance(value, (float, int)) or getattr(value, "ndim", None) == 0
    return float(value) if is_number else value


def _has_nonfinite(value: Any) -> bool:
    """Returns whether a value that is no number holds NaN or inf."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):  # ragged, or no numbers
        return False
    return not np.all(np.isfinite(array))


def _first_sentence(text: str) -> str:
    return text.split(". ")[0][:200]
