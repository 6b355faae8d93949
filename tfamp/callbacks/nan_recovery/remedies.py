"""What is changed after a model was put back, so that it does not fail again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from tfamp.dtypes import layer_dtypes, model_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.keras_hooks import optimizers, structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.records.formats import HALF
from tfamp.stepping.snapshots import State, named_variables, optimizers_of, tally_of

DROP, RATE, SCALE, FLOAT32 = (
    "drop batch",
    "cut learning rate",
    "move loss scale",
    "keep in float32",
)
REMEDIES = (DROP, RATE, SCALE, FLOAT32)
# What each cause asks for, the best first.
_BY_CAUSE = {
    "data": (DROP,),
    "learning rate": (RATE,),
    "optimizer": (RATE,),
    "loss scale": (SCALE, RATE),
    "precision": (FLOAT32, SCALE, RATE),
}
# Four steps of a scale that halves.
_SCALE_FACTOR = 16.0


def in_order(cause: str, *, allowed: Sequence[str]) -> list[str]:
    """Returns the remedies for a failure, the best first; none where it is hopeless.

    Without a cause ("" or "none") a batch is dropped: a learning rate that nothing
    speaks against stays, unless a cut is all that is allowed.
    """
    if cause == "model":
        return []
    wanted = _BY_CAUSE.get(cause, (DROP,) if DROP in allowed else (RATE,))
    return [remedy for remedy in wanted if remedy in allowed]


@keras.saving.register_keras_serializable(package="tfamp")
class CutSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning-rate schedule times a number."""

    def __init__(self, schedule: Any, factor: float) -> None:
        self.schedule, self.factor = schedule, factor

    def __call__(self, step: Any) -> Any:
        """Returns the rate of a step."""
        return self.schedule(step) * self.factor

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CutSchedule":
        """Creates the schedule from what `get_config` gave."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])


def multiply_rates(
    model: keras.Model, *, held: float, factor: float
) -> tuple[str, bool]:
    """Multiplies the learning rates of all optimizers of a model.

    Rates that are variables are multiplied by `held`, schedules by `factor`, each as
    the user gave it. Returns the change for people, "" for none, and whether a schedule
    was changed, which traced functions hold.
    """
    text, needs_trace = "", False
    for optimizer in optimizers_of(model):
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        rate = optimizer.learning_rate
        if isinstance(rate, keras.Variable):
            before = float(rate.numpy())
            optimizer.learning_rate = before * held
            text = text or f"{before:g} -> {before * held:g}"
            continue
        schedule = optimizers.rate_or_schedule(optimizer)
        if isinstance(schedule, CutSchedule):
            schedule = schedule.schedule
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            optimizer.learning_rate = CutSchedule(schedule, factor)
            needs_trace = True
            text = text or f"schedule x {factor:g}"
    return text, needs_trace


def find_layer(model: keras.Model, path: str | None) -> Any:
    """Returns the layer or operation of a path or name, None for none or several."""
    # Here, as it is needed when something has failed.
    from tfamp.stepping.eager_step import sites

    found = sites(model)
    for ways in (
        [site.layer for site in found if site.path == path],
        [s.layer for s in found if path and getattr(s.layer, "path", None) == path],
        [site.layer for site in found if site.layer.name == path],
    ):
        if len(ways) == 1 and ways[0] is not model:
            return ways[0]
    return None


def keep_float32(model: keras.Model, layer: Any) -> bool:
    """Makes a layer compute in float32, weights and slots untouched.

    A managed layer computes in float32, its output cast to the policy's dtype. Any
    other gives float32, as one that was made with `dtype="float32"`. An operation of a
    Functional graph does so in this process. Returns whether anything changed; then the
    model's functions are to be traced anew.
    """
    if not isinstance(layer, keras.layers.Layer):
        dtypes = structure.compute_dtypes(model) & {*HALF}
        rule_of = ("NanRecovery", "a failed step was traced to this operation")
        if not dtypes or not model_dtypes.keep(layer, min(dtypes), *rule_of):
            return False
        logging.warning(
            "%r is an operation of a Functional graph, which has no dtype: only tfamp "
            "has it compute in float32, now and where it loads the model. Put it into "
            "a layer that is made with `dtype='float32'` for others.",
            layer.name,
        )
        return True
    if not structure.compute_dtypes(layer) & {*HALF}:
        return False
    policy = policy_of(layer)
    if policy is None:
        for _, inner, _ in structure.walk(layer):
            if inner.compute_dtype in HALF:
                inner.dtype_policy = keras.DTypePolicy("float32")
        return True
    rule = Rule("NanRecovery", "a failed step was traced to this layer")
    policy.settings.keep(layer, rule)
    layer_dtypes.propagate_to_sublayers(layer)
    return True


def with_other_scale(
    model: keras.Model, state: State, verdict: Any
) -> tuple[State, str]:
    """Returns a state with another loss scale, and the change for people.

    The scale is what the triage found, or is moved by a factor of 16. The text is ""
    where the model has no loss scale, or it is at its end.
    """
    names = {id(each.variable): each.name for each in named_variables(model)}
    arrays, text = dict(state.arrays), ""
    raises = "raise" in str(getattr(verdict, "remedy", "")).lower()
    factor = _SCALE_FACTOR if raises else 1 / _SCALE_FACTOR
    for optimizer in optimizers_of(model):
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            continue
        name = names[id(optimizer.dynamic_scale)]
        before = float(arrays[name])
        scale = getattr(verdict, "loss_scale", None) or before * factor
        if tally_of(optimizer) is not None:
            scale = min(max(scale, optimizer.rule.min_scale), optimizer.rule.max_scale)
        if scale != before:
            arrays[name] = np.asarray(scale, arrays[name].dtype)
            text = text or f"{before:g} -> {scale:g}"
    return dataclasses.replace(state, arrays=arrays), text
