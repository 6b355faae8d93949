"""Rules on Keras's own layers that half precision spoils."""

import math
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.health.profile import NOISY
from tfamp.keras_hooks import structure
from tfamp.numerics.lint.graph import PASSING, Graph
from tfamp.numerics.lint.subject import Found, Part, Subject, rule
from tfamp.records import formats
from tfamp.records.formats import HALF

# Answers from here on are rounded to 1 (a distance of half the spacing below 1), so
# that the gradient of a wrong one is 0: ln(2**12) in float16, ln(2**9) in bfloat16.
_SURE_AT = {"float16": 8.3, "bfloat16": 6.2}
_DIGITS = {"float16": 3, "bfloat16": 2}
_SATURATING = ("Softmax", "LogSoftmax", "Sigmoid")


@rule("half-head")
def half_head(subject: Subject) -> Iterator[Found]:
    """Outputs that are made in half precision, above all by softmax and sigmoid."""
    seen = set()
    graph = subject.graph
    for output in tf.nest.flatten(graph.concrete.outputs):
        if not output.dtype.is_floating:
            continue
        maker = graph.maker(output.op.name, output.value_index, PASSING | {"Cast"})
        dtype = maker.dtype() or output.dtype.name
        saturates = maker.op in _SATURATING
        if dtype not in HALF or not (saturates or output.dtype.name in HALF):
            continue
        if (maker.layer, maker.op) in seen:
            continue
        seen.add((maker.layer, maker.op))
        if saturates:
            message = (
                f"The output is the {maker.op.lower()} of this layer in {dtype}: from "
                f"logits of about {_SURE_AT[dtype]:g} on it is rounded to 0 or 1, "
                "where the gradient of a wrong answer is 0 or NaN."
            )
        else:
            message = (
                f"This layer makes an output in {dtype}, with {_DIGITS[dtype]} digits, "
                "and the loss is computed on what was rounded."
            )
        yield Found(
            "error" if saturates else "warning",
            message,
            "Give the layer `dtype='float32'`, or build the model under "
            "`tfamp.enable`, which keeps heads in float32.",
            maker.layer or None,
            _SURE_AT[dtype] if saturates else formats.FORMATS[dtype].epsilon,
            {"dtype": dtype, "operation": maker.name},
        )


@rule("half-loss", needs=("loss",))
def half_loss(subject: Subject) -> Iterator[Found]:
    """Losses that compute in half precision themselves."""
    losses = [
        each
        for each in structure.flatten(subject.loss)
        if isinstance(each, keras.losses.Loss) and each.dtype in HALF
    ]
    names = [each.name for each in losses]
    if keras.config.floatx() in HALF:
        names.append("Keras's default for losses (`keras.config.floatx()`)")
    for name in dict.fromkeys(names):
        dtype = losses[0].dtype if losses else keras.config.floatx()
        largest = formats.FORMATS[dtype].max
        yield Found(
            "error",
            f"The loss {name!r} is computed in {dtype}: logarithms and sums over the "
            f"batch have {_DIGITS[dtype]} digits and end at {largest:g}.",
            "Leave out the loss's `dtype`, and keep `keras.config.floatx()` at "
            "'float32'.",
            None,
            largest,
            {"dtype": dtype},
        )


@rule("shifted-normalization")
def shifted_normalization(subject: Subject) -> Iterator[Found]:
    """Normalization of numbers that lie far from 0, rounded before the mean goes."""
    for part in subject.half():
        if _gets_exact_inputs(part, subject.traced):
            continue
        share, mean, std = _lost(part)
        if share <= NOISY:
            continue
        yield Found(
            "error" if share > 0.5 else "warning",
            f"{type(part.layer).__name__} subtracts a mean of {mean:.4g} from numbers "
            f"that were rounded to {part.dtype} before; what varies is {std:.3g}, and "
            f"rounding takes {min(share, 9.99):.0%} of it.",
            "Standardize in float32: give the layer `dtype='float32'` and float32 "
            "inputs, or build the model under `tfamp.enable`.",
            part.path,
            share,
            {"dtype": part.dtype, "mean": mean, "std": std},
        )


def _gets_exact_inputs(part: Part, graph: Graph | None) -> bool:
    """States whether tfamp hands a layer its input before it is rounded.

    It does for the layer that comes first, or behind one in float32.
    """
    if part.record is None or not part.record.exact_inputs:
        return False
    casts = graph.of_type("Cast") if graph is not None else []
    # What it gets in half precision, it widens by itself.
    return not any(
        node.layer == part.path and node.dtype("SrcT") in HALF for node in casts
    )


def _lost(part: Part) -> tuple[float, float, float]:
    """Returns (share lost to rounding, mean, deviation) of the worst feature."""
    layer, found = part.layer, None
    if isinstance(layer, keras.layers.Normalization):
        if layer.input_mean is not None:
            found = layer.input_mean, layer.input_variance
        elif layer.built:
            found = layer.adapt_mean, layer.adapt_variance
    elif isinstance(layer, keras.layers.BatchNormalization) and layer.built:
        found = layer.moving_mean, layer.moving_variance
    if found is None:
        return 0.0, 0.0, 0.0
    mean, variance = (np.asarray(x, np.float64).ravel() for x in found)
    std = np.sqrt(np.maximum(variance, 0))
    epsilon = formats.FORMATS[part.dtype].epsilon
    # Rounding is off by the spacing over the root of 12 in the mean square.
    exponent = np.floor(np.log2(np.maximum(np.abs(mean), np.finfo(float).tiny)))
    noise = np.exp2(exponent) * epsilon / math.sqrt(12)
    share = np.divide(noise, std, out=np.zeros_like(std), where=std > 0)
    worst = int(np.argmax(share))
    return float(share[worst]), float(mean[worst]), float(std[worst])
