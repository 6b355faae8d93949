"""Rules on what makes a model's outputs, and on the loss that reads them."""

from collections.abc import Iterator

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.lint.graph import PASSING, Graph
from tfamp.numerics.lint.rule import Found, rule
from tfamp.numerics.lint.subject import Subject
from tfamp.records import formats
from tfamp.records.formats import HALF

# Answers from here on are rounded to 1 (a distance of half the spacing below 1), so
# that the gradient of a wrong one is 0: ln(2**12) in float16, ln(2**9) in bfloat16.
_SURE_AT = {"float16": 8.3, "bfloat16": 6.2}
_SATURATING = ("Softmax", "LogSoftmax", "Sigmoid")
_HANDED_ON = PASSING | {"Cast"}


@rule("half-head", needs=("graph",))
def half_head(subject: Subject) -> Iterator[Found]:
    """Outputs that are made in half precision, above all by softmax and sigmoid."""
    seen = set()
    graph: Graph = subject.graph  # type: ignore[assignment]
    for output in tf.nest.flatten(graph.concrete.outputs):
        if not output.dtype.is_floating:
            continue
        maker = graph.maker(output.op.name, output.value_index, _HANDED_ON)
        dtype = maker.dtype() or output.dtype.name
        saturates = maker.op in _SATURATING
        if dtype not in HALF or not (saturates or output.dtype.name in HALF):
            continue
        if (maker.layer, maker.op) in seen:
            continue
        seen.add((maker.layer, maker.op))
        where, details = maker.layer or None, {"dtype": dtype, "operation": maker.name}
        remedy = (
            "Give the layer `dtype='float32'`, or build the model under "
            "`tfamp.enable`, which keeps heads in float32."
        )
        if saturates:
            yield Found(
                "error",
                f"The output is the {maker.op.lower()} of this layer in {dtype}: from "
                f"logits of about {_SURE_AT[dtype]:g} on it is rounded to 0 or 1, "
                "where the gradient of a wrong answer is 0 or NaN.",
                remedy,
                where,
                _SURE_AT[dtype],
                details,
            )
        else:
            yield Found(
                "warning",
                f"This layer makes an output in {dtype}, with "
                f"{'3' if dtype == 'float16' else '2'} digits, and the loss is "
                "computed on what was rounded.",
                remedy,
                where,
                formats.FORMATS[dtype].epsilon,
                details,
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
            f"batch have {'3' if dtype == 'float16' else '2'} digits and end at "
            f"{largest:g}.",
            "Leave out the loss's `dtype`, and keep `keras.config.floatx()` at "
            "'float32'.",
            None,
            largest,
            {"dtype": dtype},
        )
