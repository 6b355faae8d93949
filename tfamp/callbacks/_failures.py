"""How a training shows that it has failed, and what keeps it from doing so again."""

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.keras_hooks import exact_values, optimizers, structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.loss_scale import stops
from tfamp.records.formats import HALF
from tfamp.stepping.eager_step import sites
from tfamp.stepping.snapshots import tally_of

DROP, RATE = "drop batch", "cut learning rate"
SCALE, FLOAT32 = "move loss scale", "keep in float32"
# What each cause of a triage asks for, the best first; without a cause a batch goes.
REMEDIES: dict[str, tuple[str, ...]] = {
    "data": (DROP,),
    "learning rate": (RATE,),
    "optimizer": (RATE,),
    "loss scale": (SCALE, RATE),
    "precision": (FLOAT32, SCALE, RATE),
    "model": (),
}
_STALLED_SKIPS = 8  # a scale at its floor is at fault no more after so many
_SCALE_FACTOR = 16.0  # four steps of a scale that halves
# How `tf.debugging.enable_check_numerics` words its error.
_CHECKED = ("Tensor had NaN", "Tensor had Inf", "!!! Detected Infinity or NaN")


class Sign(NamedTuple):
    """One sign of failure: "loss", "weights", "skip" or "error", and it in words."""

    kind: str
    text: str


def plain(logs: Any) -> Any:
    """Returns the logs of a step with numbers as Python's own, which waits for them."""
    if not isinstance(logs, Mapping):
        return float(logs) if getattr(logs, "ndim", 1) == 0 else logs
    return {name: plain(value) for name, value in logs.items()}


def is_finite(leaf: Any) -> bool:
    """States whether numbers are finite, or something is none."""
    with contextlib.suppress(TypeError, ValueError):  # ragged, or no numbers
        return bool(np.all(np.isfinite(np.asarray(leaf, np.float64))))
    return True


def of_logs(logs: Any) -> Sign | None:
    """Returns the sign where a loss or metric is NaN or inf."""
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        for leaf in tf.nest.flatten(value):
            if not is_finite(leaf):
                return Sign("loss", f"{name} is {leaf}"[:80])
    return None


def of_error(error: BaseException) -> Sign | None:
    """Returns the sign where an error of a training step says that numbers failed."""
    text = str(error) if isinstance(error, stops.LossScaleError) else None
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = stops.found_in(error.message)
        if text is None and any(mark in error.message for mark in _CHECKED):
            text = "a checked tensor had NaN or inf"
    return None if text is None else Sign("error", text.split(". ")[0][:200])


def of_weights(model: keras.Model) -> Sign | None:
    """Returns the sign where a weight or moving statistic is not finite; it waits."""
    local = model.distribute_strategy.experimental_local_results
    paths, flags = [], []
    for variable in model.variables:
        for part in local(variable.value):
            if part.dtype.is_floating:
                paths.append(variable.path)
                flags.append(tf.reduce_all(tf.math.is_finite(part)))
    found = np.array(tf.stack(flags)) if flags else np.array([True])
    if found.all():
        return None
    path = paths[int(found.argmin())]
    return Sign("weights", f"{path} holds values that are not finite")


def of_scale(model: keras.Model) -> Sign | None:
    """Returns the sign where the loss scale stands at its end and steps are skipped."""
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
    return None


@keras.saving.register_keras_serializable(package="tfamp")
class CutSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule times a number."""

    def __init__(self, schedule: Any, factor: float) -> None:
        if isinstance(schedule, dict):  # from a file
            schedule = keras.saving.deserialize_keras_object(schedule)
        self.schedule, self.factor = schedule, factor

    def __call__(self, step: Any) -> Any:
        """Returns the rate of a step."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor}


def multiply_rates(model: keras.Model, factor: float) -> tuple[str, bool]:
    """Multiplies the rates of all optimizers; returns a text, "" for none.

    And whether a schedule was changed, which traced functions hold.
    """
    text, needs_trace = "", False
    for optimizer in optimizers_of(model):
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        rate, schedule = optimizer.learning_rate, optimizers.rate_or_schedule(optimizer)
        if isinstance(rate, keras.Variable):
            before = float(rate.numpy())
            optimizer.learning_rate = before * factor
            text = text or f"{before:g} -> {before * factor:g}"
        elif isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            optimizer.learning_rate = CutSchedule(schedule, factor)
            needs_trace, text = True, text or f"schedule x {factor:g}"
    return text, needs_trace


def move_scale(model: keras.Model, verdict: Any) -> str:
    """Moves the loss scale to what the triage found, or by 16; "" if it cannot."""
    text = ""
    factor = _SCALE_FACTOR if "raise" in verdict.remedy.lower() else 1 / _SCALE_FACTOR
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            before = float(optimizer.dynamic_scale.numpy())
            scale = verdict.loss_scale or before * factor
            if tally_of(optimizer) is not None:
                least, most = optimizer.rule.min_scale, optimizer.rule.max_scale
                scale = min(max(scale, least), most)
            if scale != before:
                optimizer.dynamic_scale.assign(scale)
                text = text or f"{before:g} -> {scale:g}"
    return text


def keep_in_float32(model: keras.Model, verdict: Any) -> str:
    """Has the layers that a triage names compute in float32; returns their paths."""
    known, kept = {site.path: site.layer for site in sites(model)}, []
    rule = Rule("NanRecovery", "a failed step was traced to it")
    for path in verdict.layers or (verdict.layer,):
        layer = known.get(path, model)
        is_layer = isinstance(layer, keras.layers.Layer)
        dtypes = structure.compute_dtypes(layer if is_layer else model) & {*HALF}
        if not dtypes or layer is model:
            continue
        if not is_layer:
            if not exact_values.keep(layer, min(dtypes), rule.name, rule.reason):
                continue
        elif (policy := policy_of(layer)) is not None:
            policy.settings.keep(layer, rule)
            layer_dtypes.propagate_to_sublayers(layer)
        else:
            for _, inner, _ in structure.walk(layer):
                if inner.compute_dtype in HALF:
                    inner.dtype_policy = keras.DTypePolicy("float32")
        kept.append(repr(path))
    return ", ".join(kept)
