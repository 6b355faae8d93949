"""The rules of the linter: each yields what it finds in a subject."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.health.columns import NOISY, rounding_for
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.numerics.lint.graph import PASSING, Graph, Node
from tfamp.numerics.lint.subject import Subject
from tfamp.numerics.passes import name_layers
from tfamp.records.findings import Severity
from tfamp.records.formats import FORMATS, HALF

# Answers from here on are rounded to 1 (a distance of half the spacing below 1), so
# that the gradient of a wrong one is 0: ln(2**12) in float16, ln(2**9) in bfloat16.
_SURE_AT = {"float16": 8.3, "bfloat16": 6.2}
_DIGITS = {"float16": 3, "bfloat16": 2}
_SATURATING = ("Softmax", "LogSoftmax", "Sigmoid")
# TensorFlow adds bfloat16 in float32, but for running sums; float16 as it is.
_SUMS = ("Sum", "Mean", "Prod", "EuclideanNorm")
_RUNNING = ("Cumsum", "Cumprod")
_POOLS = ("AvgPool", "AvgPool3D")
# Keras's own, whose epsilon and mask are no fault.
_EXEMPT = (keras.layers.UnitNormalization, keras.layers.Dot)
# Where a divisor or an argument of a logarithm stands.
_DIVIDING = dict.fromkeys(("RealDiv", "Div", "DivNoNan"), 1) | dict.fromkeys(
    ("Rsqrt", "Log", "Log1p", "Inv", "Reciprocal", "Pow"), 0
)
_BEFORE_DIVIDING = frozenset(("Sqrt", "Identity", "Reshape", "ExpandDims", "Cast"))
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Found(NamedTuple):
    """What a rule found; a layer or figure of None where it is about none.

    Of findings of a rule on one layer, as bad and `about` the same, the first counts.
    """

    severity: Severity
    message: str
    remedy: str
    layer: str | None = None
    figure: float | None = None
    about: int | str = ""


def half_head(subject: Subject) -> Iterator[Found]:
    """Outputs that are made in half precision, above all by softmax and sigmoid."""
    graph = subject.graph
    for output in tf.nest.flatten(graph.concrete.outputs):
        if not output.dtype.is_floating:
            continue
        maker = graph.maker(output.op.name, output.value_index, PASSING | {"Cast"})
        dtype = maker.dtype() or output.dtype.name
        saturates = maker.op in _SATURATING
        if dtype not in HALF or not (saturates or output.dtype.name in HALF):
            continue
        message = (
            f"This layer makes an output in {dtype}, with {_DIGITS[dtype]} digits, "
            "and the loss is computed on what was rounded."
        )
        if saturates:
            message = (
                f"The output is the {maker.op.lower()} of this layer in {dtype}: from "
                f"logits of about {_SURE_AT[dtype]:g} on it is rounded to 0 or 1, "
                "where the gradient of a wrong answer is 0 or NaN."
            )
        yield Found(
            "error" if saturates else "warning",
            message,
            "Give the layer `dtype='float32'`, or build the model under "
            "`tfamp.enable`, which keeps heads in float32.",
            maker.layer or None,
            _SURE_AT[dtype] if saturates else FORMATS[dtype].epsilon,
        )


def half_loss(subject: Subject) -> Iterator[Found]:
    """Losses that compute in half precision themselves."""
    losses = {
        each.name: each.dtype
        for each in structure.flatten(subject.loss)
        if isinstance(each, keras.losses.Loss) and each.dtype in HALF
    }
    if keras.config.floatx() in HALF:
        losses["Keras's default for losses (`keras.config.floatx()`)"] = (
            keras.config.floatx()
        )
    for name, dtype in losses.items():
        yield Found(
            "error",
            f"The loss {name!r} is computed in {dtype}: logarithms and sums over the "
            f"batch have {_DIGITS[dtype]} digits and end at {FORMATS[dtype].max:g}.",
            "Leave out the loss's `dtype`, and keep `keras.config.floatx()` at "
            "'float32'.",
            None,
            FORMATS[dtype].max,
            about=name,
        )


def late_policy(subject: Subject) -> Iterator[Found]:
    """Layers that were made before the policy, and so in float32."""
    records = {path: policy_of(layer) for path, layer in subject.layers.items()}
    settings = [IN_FORCE.settings, *(r.settings for r in records.values() if r)]
    wanted = [s.policy.name for s in settings if s is not None and s.is_half]
    computing = [p for p, each in subject.layers.items() if structure.own_weights(each)]
    late = [
        path
        for path in computing
        if records[path] is None and subject.layers[path].compute_dtype == "float32"
    ]
    if wanted and late:
        yield Found(
            "warning",
            f"{len(late)} of {len(computing)} layers with weights were made in float32 "
            f"before the policy {wanted[0]!r} was set, and stay there: "
            f"{name_layers(late)}.",
            "Set the policy before the first layer is made, or convert the model in "
            "place: `tfamp.apply(model)`.",
            late[0],
            len(late),
        )


def half_weights(subject: Subject) -> Iterator[Found]:
    """Trainable weights in half precision, and what optimizers lose on them.

    Keras casts rates, betas and epsilons to the dtype of the weight, and keeps the
    moments in it.
    """
    for dtype in HALF:
        layers = subject.stored_in(dtype)
        if not layers:
            continue
        spacing, tiny = FORMATS[dtype].epsilon, FORMATS[dtype].smallest_subnormal
        remedy = f"Use the policy 'mixed_{dtype}', which keeps weights in float32."
        yield Found(
            "warning",
            f"The weights of {name_layers(layers)} are stored in {dtype}, where the "
            f"next number after 1 is {1 + spacing:g}: an update of less than "
            f"{spacing / 4:.2g} of a weight is lost, and at a learning rate of "
            "0.001 those near 1 hardly move or never.",
            remedy,
            layers[0],
            spacing / 4,
        )
        for optimizer in subject.optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            for name in ("beta_1", "beta_2", "momentum", "rho"):
                value = getattr(inner, name, None)
                # Below 1 numbers lie half as far apart, and a tie goes to 1.
                if isinstance(value, float) and 1 - spacing / 4 <= value < 1:
                    yield Found(
                        "error",
                        f"`{name}={value:g}` of {inner.name!r} is 1 in {dtype}, in "
                        f"which {name_layers(layers)} are stored: what it averages "
                        "never decays, and corrections by 1 - 1**t are 0.",
                        remedy,
                        layers[0],
                        value,
                        about=name,
                    )
            for name in ("epsilon", "epsilon_1"):
                value = getattr(inner, name, None)
                if isinstance(value, float) and 0 < value <= tiny / 2:
                    yield Found(
                        "error",
                        f"`{name}={value:g}` of {inner.name!r} is 0 in {dtype}, in "
                        f"which {name_layers(layers)} are stored: where the squares of "
                        "gradients are 0, the update is 0 / 0 or inf.",
                        remedy,
                        layers[0],
                        value,
                        about=name,
                    )


def vanishing_epsilon(subject: Subject) -> Iterator[Found]:
    """Epsilons of layers that are 0 in the dtype they are added in."""
    graph = subject.graph
    for node in graph.of_type("AddV2", "Add", "Maximum"):
        dtype, layer = node.dtype(), subject.layers.get(node.layer)
        if (
            dtype not in HALF
            or isinstance(layer, _EXEMPT)
            or not _adds_nothing(node)
            or not _is_divided_by(graph, node)
        ):
            continue
        format = FORMATS[dtype]
        values = [getattr(layer, name, None) for name in ("epsilon", "eps")]
        written = [float(v) for v in values if isinstance(v, (int, float))]
        text = f"{written[0]:g}" if written else "what is added"
        least = 10.0 ** math.ceil(math.log10(format.smallest_normal))
        yield Found(
            "error",
            f"An epsilon guards a divisor, a root or a logarithm in {dtype}, but "
            f"{text} is 0 there: the smallest number is "
            f"{format.smallest_subnormal:.1e}. It guards nothing, and 0 / 0 is NaN.",
            f"Take an epsilon of at least {least:.0e}, or compute this part in float32 "
            "(`dtype='float32'`).",
            node.layer or None,
            written[0] if written else 0.0,
        )


def _adds_nothing(node: Node) -> bool:
    """States whether the second term is a constant 0.

    Not the first: `sum(tensors)` begins with 0.
    """
    value = node.value(1) if len(node.inputs) > 1 else None
    return value is not None and np.size(value) == 1 and float(np.ravel(value)[0]) == 0


def _is_divided_by(graph: Graph, node: Node) -> bool:
    for reader in graph.readers_past(node, _BEFORE_DIVIDING):
        at: Node | None = None
        if reader.op in _DIVIDING:
            at = graph.producer(reader, _DIVIDING[reader.op])
        while at is not None and at.op in _BEFORE_DIVIDING and at != node:
            at = graph.producer(at, 0)
        if at == node:
            return True
    return False


def constant_range(subject: Subject) -> Iterator[Found]:
    """Constants beyond a format's range, above all in masks."""
    graph = subject.graph
    for node, dtype, value in _beyond(graph):
        users = {reader.op for reader in graph.readers_past(node)}
        layer = subject.layers.get(node.layer)
        if users <= {"Minimum", "Maximum"} or isinstance(layer, _EXEMPT):
            continue  # a limit that nothing reaches
        is_factor = "Mul" in users
        came = "is infinite" if np.isinf(value) else f"of {value:g} becomes infinite"
        effect = (
            "a row in which it masks everything is NaN after a softmax, and so is "
            "inf - inf"
        )
        if is_factor:
            effect = (
                "where it is multiplied by 0, as in a mask of (1 - m) * constant, the "
                "result is NaN"
            )
        yield Found(
            "error" if is_factor else "warning",
            f"A constant {came} in {dtype}, which ends at {FORMATS[dtype].max:.4g}: "
            f"{effect}.",
            "Take a constant within the format, such as "
            f"{'-3e4' if dtype == 'float16' else '-1e9'}, or compute the mask in "
            "float32.",
            node.layer or None,
            value,
        )


def _beyond(graph: Graph) -> Iterator[tuple[Node, str, float]]:
    """Yields (operation, dtype, value) of constants that are infinite in a format.

    What a cast meets counts: a constant, or one that is a factor or term. Infinite
    ones ahead of a cast were written so and are no fault of the format.
    """
    for node in graph.nodes:
        if node.op == "Const" and node.dtype("dtype") in HALF:
            array = node.constant
            if array is not None and np.isinf(array).any():
                yield node, node.dtype("dtype"), float(array[np.isinf(array)].flat[0])
        elif node.op == "Cast" and node.dtype("DstT") in HALF:
            before = graph.producer(node, 0)
            behind = [before]
            if before and before.op in ("Mul", "SelectV2", "Select", "AddV2", "Sub"):
                places = range(len(before.inputs))
                behind = [graph.producer(before, place) for place in places]
            arrays = [each.constant for each in behind if each is not None]
            values = [a[np.isfinite(a)].ravel() for a in arrays if a is not None]
            value = max((v for a in values for v in a), key=abs, default=0.0)
            if abs(value) > FORMATS[node.dtype("DstT")].max:
                yield node, node.dtype("DstT"), float(value)


def long_reduction(subject: Subject) -> Iterator[Found]:
    """Sums of more terms than the format has steps between 1 and 2."""
    for node in subject.graph.of_type(*_SUMS, *_RUNNING, *_POOLS):
        dtype, count = node.dtype(), _num_terms(node)
        if dtype not in HALF or count is None:
            continue
        # 1 is half the spacing there. Measured on a CPU: a window of 256 equal numbers
        # is exact in float16, one of 1024 is off by 12 %; a sum of 2048 ones over a
        # middle axis is exact, one of 4096 is 2048. GPUs add in float32, but the sum
        # itself still overflows.
        stops_at = limit = int(2 / FORMATS[dtype].epsilon)
        if node.op in _POOLS:
            limit //= 4
        if count <= limit or (dtype == "bfloat16" and node.op not in _RUNNING):
            continue
        effect = "all that follows is lost"
        if dtype == "float16":
            effect = f"one of {FORMATS[dtype].max / count:.3g} each ends in inf"
        yield Found(
            "warning",
            f"{node.op} adds {count:,} terms in {dtype}, where a sum of ones stops at "
            f"{stops_at:,} and {effect}.",
            "Cast to float32 before the sum and back after it, give the layer "
            "`dtype='float32'`, or build the model under `tfamp.enable`, which does so "
            "for Keras's layers and running sums.",
            node.layer or None,
            count,
        )


def _num_terms(node: Node) -> int | None:
    """Returns how many numbers go into one result, None where it is not known."""
    if node.op in _POOLS:
        return math.prod(node.definition.attr["ksize"].list.i)
    shape, axes = node.shape(0), node.value(1)
    if shape is None or axes is None:
        return None
    # A batch of unknown size has at least one example.
    return math.prod(shape[int(axis)] or 1 for axis in axes.ravel())


def _casts(graph: Graph) -> Iterator[tuple[int, Node, bool]]:
    """Yields input, cast to half precision, and whether it becomes integers again."""
    for index, leaf in graph.leaves.items():
        for cast in graph.readers_past(leaf):
            if cast.op == "Cast" and cast.dtype("DstT") in HALF:
                readers = graph.readers_past(cast)
                targets = {r.dtype("DstT") for r in readers if r.op == "Cast"}
                yield index, cast, bool(targets & {*_INTEGERS})


def unnormalised_input(subject: Subject) -> Iterator[Found]:
    """Inputs that lose what varies in them as they are cast, or whose squares do."""
    for index, cast, becomes_ids in _casts(subject.graph):
        dtype = cast.dtype("DstT")
        values = subject.leaves[index].astype(np.float64)
        # What is not finite is wrong in float32 too: `tfamp.data.check` says it.
        if becomes_ids or not np.isfinite(values).all() or not values.size:
            continue
        limit = FORMATS[dtype].max
        largest = figure = float(np.abs(values).max())
        rounded = rounding_for(dtype)(np.clip(values, -limit, limit))
        std = values.std(axis=0)
        noise = np.sqrt(np.mean((rounded - values) ** 2, axis=0))
        share = np.divide(noise, std, out=np.zeros_like(std), where=std > 0)
        worst = int(np.argmax(share))
        size = float(np.sqrt(np.mean(values**2, axis=0)).max())
        if largest > limit:
            text = (
                f"reaches {largest:.4g} and is cast to {dtype}, which ends at "
                f"{limit:.4g}: it becomes inf."
            )
        elif share[worst] > NOISY:
            figure = float(share[worst])
            text = (
                f"lies at {values.mean(axis=0)[worst]:.4g} +- {std[worst]:.3g} in "
                f"column {worst} and is cast to {dtype}: rounding takes "
                f"{share[worst]:.0%} of what varies in it."
            )
        elif size > math.sqrt(limit):
            figure = size
            text = (
                f"is of size {size:.4g} (root mean square) and is cast to {dtype}: "
                f"squares of such numbers pass {limit:.4g}, and so do products over a "
                "few hundred of them."
            )
        else:
            continue
        yield Found(
            "error" if largest > limit else "warning",
            f"Input {index} {text}",
            "Standardize the input before the model, or by a layer in float32: "
            "`tfamp.data.fit_statistics(...).as_layer()`.",
            cast.layer or None,
            figure,
            about=index,
        )


def float_ids(subject: Subject) -> Iterator[Found]:
    """Ids in a float input that half precision rounds to other ids."""
    graph = subject.graph
    for index, cast, becomes_ids in _casts(graph):
        if not becomes_ids:
            continue
        exact = rounding_for(cast.dtype("DstT")).max_integer
        values = subject.leaves[index]
        finite = np.where(np.isfinite(values), values, 0.5)
        # Of the features that hold integers only.
        integers = (finite == np.round(finite)).all(axis=0)
        reach = largest = int(np.abs(finite[:, integers]).max(initial=0))
        path = cast.layer
        for reader in graph.readers_past(cast, PASSING | {"Cast"}):
            layer: Any = subject.layers.get(reader.layer)
            if isinstance(layer, keras.layers.Embedding):
                path, reach = reader.layer, max(reach, layer.input_dim - 1)
        if reach <= exact:
            continue
        beyond = largest > exact
        yield Found(
            "error" if beyond else "warning",
            f"Input {index} holds ids up to {largest if beyond else reach:,} as floats"
            + ("" if beyond else " (by the size of the table)")
            + f" and is cast to {cast.dtype('DstT')} before they are looked up: beyond "
            f"{exact:,} neighbours become one, such as {exact:,} and {exact + 1:,}.",
            "Feed ids as integers, in an input of their own "
            "(`keras.Input(..., dtype='int32')`).",
            path or None,
            largest if beyond else reach,
            about=index,
        )


# Rule -> what it has to see besides layers and graph, and its function.
RULES: dict[str, tuple[str, Callable[[Subject], Iterator[Found]]]] = {
    "half-head": ("", half_head),
    "half-loss": ("loss", half_loss),
    "late-policy": ("", late_policy),
    "half-weights": ("", half_weights),
    "vanishing-epsilon": ("", vanishing_epsilon),
    "constant-range": ("", constant_range),
    "long-reduction": ("", long_reduction),
    "unnormalised-input": ("data", unnormalised_input),
    "float-ids": ("data", float_ids),
}
