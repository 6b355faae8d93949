"""What low precision spoils in a layer, which rules keep it, and what to do."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes import heads, hooks, layer_dtypes, model_dtypes, resolution
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import Kind, policy_of, put
from tfamp.numerics.magnitudes import first_overflow
from tfamp.numerics.sensitivity.errors import Sensitivity, deviation, forward_error
from tfamp.numerics.sensitivity.reruns import rerun
from tfamp.numerics.sensitivity.shadow import Suspect, arrays
from tfamp.records.formats import Format, needs_loss_scale
from tfamp.stepping.eager_step import Site
from tfamp.stepping.layer_calls import Recorded, how_to_keep

Reason = Literal[
    "overflow",
    "underflow",
    "resolution",
    "accumulation",
    "cancellation",
    "backward",
    "constant",
    "cannot run",
]
# tfamp's first loss scale.
FIRST_SCALE = 2.0**15
# Rounding of inputs and weights explains an error where it makes this part of it.
_EXPLAINS = 0.5


# Why a layer is unsafe: in one word, and in one sentence with the figures.
Explanation = tuple[Reason, str]


def explain(
    suspect: Suspect, format: Format, *, forward_limit: float, loss_scale: float
) -> Explanation:
    """Returns why a layer that was found guilty is unsafe in a format.

    `forward_limit` is the error of outputs from which it is, `loss_scale` that at which
    its gradients were judged.
    """
    if suspect.failure:
        return "cannot run", f"it cannot run in {format.name}: {suspect.failure}"
    if suspect.worst is not None and not suspect.forward <= forward_limit:
        return _explain_forward(suspect.worst, suspect.forward, format, forward_limit)
    return "backward", _explain_backward(suspect, format, loss_scale)


def _explain_forward(
    recorded: Recorded, error: float, format: Format, limit: float
) -> Explanation:
    holds = f"{format.name} holds {format.max:.6g}"
    inputs = arrays(recorded.float_inputs)
    largest = _largest(inputs)
    if largest >= first_overflow(format):
        text = f"its inputs reach {largest:.3g}, {holds}"
        if _is_constant(inputs, format):
            return "constant", f"a constant input: {text}"
        return "overflow", text
    for constant in _constants(recorded):
        if constant >= first_overflow(format):
            return "constant", f"a constant of {constant:.3g} is beyond range, {holds}"
        if 0 < constant <= format.smallest_subnormal / 2:
            return (
                "constant",
                f"a constant of {constant:.3g} becomes 0 in {format.name}",
            )
    exact = arrays(rerun(recorded, "float32").outputs)
    largest = _largest(exact)
    if math.isinf(error):
        if largest >= first_overflow(format):
            return "overflow", f"its outputs reach {largest:.3g}, {holds}"
        return "overflow", (
            f"a number on the way to its outputs, which reach {largest:.3g} only, is "
            f"beyond range: {holds}"
        )
    rounded = arrays(rerun(recorded, format.name, rounded_only=True).outputs)
    by_rounding = max(map(forward_error, rounded, exact), default=0.0)
    if by_rounding >= min(limit, _EXPLAINS * error):
        return _explain_rounding(inputs, by_rounding, format, limit)
    low = arrays(rerun(recorded, format.name).outputs)
    pairs = zip(low, exact, strict=True)
    vanished = max((_vanished(a, b, limit) for a, b in pairs), default=0.0)
    # A format with float32's range lets nothing vanish that is not rounded away.
    if vanished > limit and needs_loss_scale(format):
        return "underflow", f"{vanished:.0%} of its outputs become 0 in {format.name}"
    return "accumulation", (
        f"its own arithmetic is off by {error:.2g} times the spread of its outputs, "
        f"while rounding what goes in costs {by_rounding:.2g} times"
    )


def _explain_rounding(
    inputs: list[np.ndarray], by_rounding: float, format: Format, limit: float
) -> Explanation:
    for values in inputs:
        with np.errstate(over="ignore"):
            low = tf.cast(tf.constant(values), format.name)
            rounded = np.asarray(tf.cast(low, tf.float32))
        lost = forward_error(rounded, values)
        if lost > limit:
            vanished = np.mean((rounded == 0) & (values != 0))
            if vanished > limit:
                text = f"{vanished:.0%} of its inputs become 0 in {format.name}"
                return "underflow", text
            return "resolution", (
                f"its inputs reach {_largest([values]):.4g} and differ by "
                f"{deviation(values):.3g}: rounding to {format.name} is off by "
                f"{lost:.2g} times that"
            )
    return "cancellation", (
        "it takes the difference of numbers that are close: rounding its inputs to "
        f"{format.name} alone moves its outputs by {by_rounding:.2g} times the spread"
    )


def _explain_backward(suspect: Suspect, format: Format, loss_scale: float) -> str:
    error = suspect.backward.get(loss_scale, math.nan)
    text = f"its gradients are off by {error:.2g} times their size"
    if suspect.worst_backward is not None:
        low = rerun(suspect.worst_backward, format.name, loss_scale=loss_scale)
        gradients = (*low.input_gradients, *low.weight_gradients)
        found = [np.asarray(each) for each in gradients if each is not None]
        if math.isinf(error) or any(not np.isfinite(each).all() for each in found):
            text = "its gradients overflow"
        elif found and all(not each.any() for each in found):
            text = "its gradients become 0"
    at = "" if loss_scale == 1 else f" at a loss scale of {loss_scale:g}"
    return f"{text} in {format.name}{at}; its outputs are fine"


def _vanished(low: np.ndarray, exact: np.ndarray, limit: float) -> float:
    """Returns which part becomes 0, or 0.0 where the rest is wrong too."""
    is_gone = (low == 0) & (exact != 0)
    if is_gone.all():
        return 1.0
    rest = forward_error(low[~is_gone], exact[~is_gone])
    return float(np.mean(is_gone)) if rest <= limit else 0.0


def _largest(values: list[np.ndarray]) -> float:
    finite = [np.abs(each[np.isfinite(each)]) for each in values]
    return max((float(each.max()) for each in finite if each.size), default=0.0)


def _is_constant(inputs: list[np.ndarray], format: Format) -> bool:
    """Whether all that is beyond range is one number, as in a mask."""
    for values in inputs:
        beyond = np.abs(values) >= first_overflow(format)
        if beyond.any() and len(np.unique(np.abs(values[beyond]))) > 1:
            return False
    return True


def _constants(recorded: Recorded) -> list[float]:
    """Returns the magnitudes of plain numbers among the arguments."""
    leaves: list[Any] = structure.flatten((recorded.args, recorded.kwargs))
    return [
        abs(float(leaf))
        for leaf in leaves
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]


def given_dtypes(model: keras.Model) -> dict[int, keras.DTypePolicy]:
    """Returns the policies of layers that a user made with a `dtype`, by id."""
    return {
        id(layer): layer.dtype_policy
        for _, layer, _ in structure.walk(model)
        if (record := policy_of(layer)) is not None and record.kind is Kind.EXPLICIT
    }


@contextlib.contextmanager
def under_rules(
    model: keras.Model,
    settings: PolicySettings,
    given: Mapping[int, keras.DTypePolicy] = MappingProxyType({}),
) -> Iterator[None]:
    """Has a model that is not managed compute as tfamp has it under settings.

    The model is built; `given` is what `given_dtypes` found before.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    hooks.install(settings)
    with model_dtypes.restored(model):
        for layer in layers:
            if id(layer) in given:
                put(layer, given[id(layer)])
                layer_dtypes.begin(layer, settings, is_explicit=True)
            else:
                layer_dtypes.begin_again(layer, settings)
        for layer in layers:
            layer_dtypes.decide(layer)
        resolution.resolve(model)
        yield


def rules_of(model: keras.Model, sites: list[Site]) -> dict[str, str]:
    """Returns what keeps layers and operations in float32, by path.

    The model has been called inside `under_rules`.
    """
    graph = heads.graph_heads(model)
    # The operations of a graph between a head and an output.
    wide = {
        id(made[0])
        for tensor in (graph.tensors if graph is not None else ())
        if tensor.dtype == "float32"
        and (made := structure.producer(tensor)) is not None
        and not isinstance(made[0], keras.layers.Layer)
    }
    found = {}
    for site in sites:
        is_layer = isinstance(site.layer, keras.layers.Layer)
        record = policy_of(site.layer) if is_layer else None
        is_float32 = record is not None and site.layer.compute_dtype == "float32"
        if record is not None and (record.is_kept or is_float32):
            is_given = record.kind is Kind.EXPLICIT
            found[site.path] = "its own dtype" if is_given else record.rule
        elif id(site.layer) in wide:
            found[site.path] = "default: heads"
    return found


def advice_on(
    found: Sensitivity, left: Sequence[Site], *, unscaled: Sequence[str], failure: str
) -> str:
    """Returns what to do about what was found, still without advice.

    `left` are the guilty layers that no default rule keeps, `unscaled` the paths whose
    gradients suffer without a loss scale, `failure` is what the step raised, "" if
    nothing.
    """
    model, dtype, scale = found.model, found.dtype, found.loss_scale
    off_by = f"{found.whole_error:.2g} times their size"
    if found.verdict == "safe":
        text = f"Nothing of {model!r} is spoiled by {dtype}: its gradients are off by "
        if not 1 < scale < FIRST_SCALE:
            return f"{text}{off_by}."
        return (
            f"{text}{off_by}. A loss scale of {scale:g} suits it: with a dynamic one "
            f"that begins at {FIRST_SCALE:g} the first steps are skipped."
        )
    if found.verdict == "loss scale" and scale == FIRST_SCALE:
        paths = ", ".join(map(repr, unscaled[:3]))
        return (
            f"It needs a loss scale, and tfamp's first one, {scale:g}, does: without "
            f"one the gradients of {paths} are spoiled. Under `tfamp.enable` it is "
            "there."
        )
    if found.verdict == "loss scale":
        return (
            f"Gradients fit {dtype} at a loss scale of {scale:g}, not at "
            f"{FIRST_SCALE:g}: pass `loss_scale_options={{'initial_scale': "
            f"{scale:g}}}` to `tfamp.enable`."
        )
    if found.verdict == "cannot run":
        return (
            f"The step of {model!r} raises in {dtype}: {failure}. `tfamp.enable` keeps "
            "a layer in float32 whose `call` does; a `train_step` is to cast to the "
            "dtype of the outputs."
        )
    if found.verdict == "amplification":
        return (
            f"Each layer is fine alone, but the model as a whole turns rounding to "
            f"{dtype} into gradients that are off by {off_by}: keeping single layers "
            "does not help. Train it in float32, or normalize between its layers."
        )
    if left:
        return how_to_keep(left)
    off = ", ".join(f"{what} by {e:.2g}" for what, e in found.errors_by_rules.items())
    rest = f" What is off then: {off}." if off else ""
    return f"`tfamp.enable` keeps them in float32 by its default rules.{rest}"
