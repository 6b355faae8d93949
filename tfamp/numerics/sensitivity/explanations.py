"""Why low precision spoils a layer, and what to do."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.sensitivity.errors import Sensitivity, deviation, forward_error
from tfamp.numerics.sensitivity.reruns import Suspect, rerun
from tfamp.records.formats import Format, needs_loss_scale
from tfamp.stepping.eager_step import Site, is_float
from tfamp.stepping.layer_calls import Recorded, how_to_keep

# tfamp's first loss scale.
FIRST_SCALE = 2.0**15
# Rounding of inputs explains an error where it makes this part of it.
_EXPLAINS = 0.5


def explain(
    suspect: Suspect, format: Format, *, forward_limit: float, loss_scale: float
) -> tuple[str, str]:
    """Returns why a guilty layer is unsafe: a word, and a sentence with the figures.

    The word is "overflow", "underflow", "resolution", "cancellation", "accumulation",
    "backward" or "cannot run". `forward_limit` is the error of outputs
    from which a layer is guilty, `loss_scale` that at which its gradients were judged.
    """
    if suspect.failure:
        return "cannot run", f"it cannot run in {format.name}: {suspect.failure}"
    if suspect.worst is not None and not suspect.forward <= forward_limit:
        return _forward(suspect.worst, suspect.forward, format, forward_limit)
    error = suspect.backward.get(loss_scale, math.nan)
    text = f"its gradients are off by {error:.2g} times their size"
    if suspect.worst_backward is not None:
        low = rerun(suspect.worst_backward, format.name, loss_scale=loss_scale)
        found = [
            g for g in (*low.input_gradients, *low.weight_gradients) if g is not None
        ]
        if math.isinf(error) or any(not np.isfinite(each).all() for each in found):
            text = "its gradients overflow"
        elif found and all(not each.any() for each in found):
            text = "its gradients become 0"
    at = "" if loss_scale == 1 else f" at a loss scale of {loss_scale:g}"
    return "backward", f"{text} in {format.name}{at}; its outputs are fine"


def _forward(
    recorded: Recorded, error: float, format: Format, limit: float
) -> tuple[str, str]:
    name, holds = format.name, f"{format.name} holds {format.max:.6g}"
    # The smallest number that is rounded to inf.
    too_large = format.max * (1 + format.epsilon / 4)
    inputs = [np.asarray(each, np.float32) for each in recorded.float_inputs]
    exact = rerun(recorded, "float32").outputs
    if _largest(inputs) >= too_large:
        return "overflow", f"its inputs reach {_largest(inputs):.3g}, {holds}"
    if math.isinf(error):
        reach = f"its outputs reach {_largest(exact):.3g}"
        if _largest(exact) < too_large:
            reach = f"a number on the way is beyond range, while {reach} only"
        return "overflow", f"{reach}, {holds}"
    args, kwargs = structure.map_structure(
        lambda x: _rounded(x, name), (recorded.args, recorded.kwargs)
    )
    of_rounded = dataclasses.replace(recorded, args=args, kwargs=kwargs)
    rounded = rerun(of_rounded, "float32").outputs
    by_rounding = max(map(forward_error, rounded, exact), default=0.0)
    is_by_rounding = by_rounding >= min(limit, _EXPLAINS * error)
    low = rerun(recorded, name).outputs
    vanished = max((_vanished(a, b, limit) for a, b in zip(low, exact, strict=True)))
    # A format with float32's range lets nothing vanish that is not rounded away.
    if vanished > limit and needs_loss_scale(format) and not is_by_rounding:
        return "underflow", f"{vanished:.0%} of its outputs become 0 in {name}"
    if not is_by_rounding:
        return "accumulation", (
            f"its own arithmetic is off by {error:.2g} times the spread of its "
            f"outputs, while rounding what goes in costs {by_rounding:.2g} times"
        )
    for values in inputs:
        low_values = np.asarray(_rounded(tf.constant(values), name))
        if (lost := forward_error(low_values, values)) <= limit:
            continue
        if (gone := _vanished(low_values, values, limit)) > limit:
            return "underflow", f"{gone:.0%} of its inputs become 0 in {name}"
        return "resolution", (
            f"its inputs reach {_largest([values]):.4g} and differ by "
            f"{deviation(values):.3g}: rounding to {name} is off by {lost:.2g} times "
            "that"
        )
    return "cancellation", (
        "it takes the difference of numbers that are close: rounding its inputs to "
        f"{name} alone moves its outputs by {by_rounding:.2g} times the spread"
    )


def _rounded(x: Any, dtype: str) -> Any:
    if not is_float(x):
        return x
    return structure.with_mask_of(x, tf.cast(tf.cast(x, dtype), x.dtype))


def _vanished(low: np.ndarray, exact: np.ndarray, limit: float) -> float:
    """Returns which part becomes 0, or 0.0 where the rest is wrong too."""
    is_gone = (low == 0) & (exact != 0)
    is_rest_fine = forward_error(low[~is_gone], exact[~is_gone]) <= limit
    return float(np.mean(is_gone)) if is_rest_fine else 0.0


def _largest(values: list[np.ndarray]) -> float:
    finite = [np.abs(each[np.isfinite(each)]) for each in values]
    return max((float(each.max()) for each in finite if each.size), default=0.0)


def advice_on(
    found: Sensitivity, guilty: Sequence[Site], *, unscaled: Sequence[str], failure: str
) -> str:
    """Returns what to do about what was found, still without advice.

    `unscaled` are the paths whose gradients suffer without a loss scale, `failure` is
    what the step raised, "" if nothing.
    """
    model, dtype, scale = found.model, found.dtype, found.loss_scale
    off_by = f"{found.whole_error:.2g} times their size"
    if guilty:
        return how_to_keep(guilty)
    if found.verdict == "loss scale" and scale != FIRST_SCALE:
        return (
            f"Gradients fit {dtype} at a loss scale of {scale:g}, not at "
            f"{FIRST_SCALE:g}: pass `loss_scale_options={{'initial_scale': "
            f"2.0**{math.log2(scale):.0f}}}` to `tfamp.enable`."
        )
    paths = ", ".join(map(repr, unscaled[:3]))
    return {
        "safe": f"Nothing of {model!r} is spoiled by {dtype}: gradients are off by "
        f"{off_by}.",
        "loss scale": f"It needs a loss scale, and tfamp's first one, {scale:g}, does: "
        f"without one the gradients of {paths} are spoiled. Under `tfamp.enable` it is "
        "there.",
        "cannot run": f"The step of {model!r} raises in {dtype}: {failure}. "
        "`tfamp.enable` keeps a layer in float32 whose `call` does; a `train_step` is "
        "to cast to the dtype of the outputs.",
        "amplification": "Each layer is fine alone, but the model as a whole turns "
        f"rounding to {dtype} into gradients that are off by {off_by}: keeping single "
        "layers does not help. Train it in float32, or normalize between its layers.",
    }[found.verdict]
