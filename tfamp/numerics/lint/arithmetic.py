"""Rules on constants that a format cannot hold: too small or too large."""

import math
from collections.abc import Iterator

import keras
import numpy as np

from tfamp.numerics.lint.graph import Graph, Node
from tfamp.numerics.lint.subject import Found, Subject, rule
from tfamp.records import formats
from tfamp.records.formats import HALF

# TensorFlow adds bfloat16 in float32, but for running sums; float16 as it is.
_SUMS = ("Sum", "Mean", "Prod", "EuclideanNorm")
_RUNNING = ("Cumsum", "Cumprod")
_POOLS = ("AvgPool", "AvgPool3D")
# Another rule says it of these.
_TOLD_ELSEWHERE = (keras.layers.UnitNormalization, keras.layers.Dot)
# Where a divisor or an argument of a logarithm stands.
_DIVIDING = dict.fromkeys(("RealDiv", "Div", "DivNoNan"), 1) | dict.fromkeys(
    ("Rsqrt", "Log", "Log1p", "Inv", "Reciprocal", "Pow"), 0
)
_BEFORE_DIVIDING = frozenset(("Sqrt", "Identity", "Reshape", "ExpandDims", "Cast"))


@rule("long-reduction")
def long_reduction(subject: Subject) -> Iterator[Found]:
    """Sums of more terms than the format has steps between 1 and 2."""
    seen = set()
    for node in subject.graph.of_type(*_SUMS, *_RUNNING, *_POOLS):
        dtype = node.dtype()
        limit = _most_terms(node.op, dtype)
        if limit is None or (node.layer, node.op) in seen:
            continue
        count = _num_terms(node)
        if count is None or count <= limit:
            continue
        seen.add((node.layer, node.op))
        effect = "all that follows is lost"
        if dtype == "float16":
            each = formats.FLOAT16.max / count
            effect = f"one of {each:.3g} each ends in inf"
        yield Found(
            "warning",
            f"{node.op} adds {count:,} terms in {dtype}, where a sum of ones stops at "
            f"{_stops_at(dtype):,} and {effect}.",
            "Cast to float32 before the sum and back after it, give the layer "
            "`dtype='float32'`, or build the model under `tfamp.enable`, which does so "
            "for Keras's layers and running sums.",
            node.layer or None,
            count,
            {"dtype": dtype, "operation": node.name, "limit": limit},
        )


def _stops_at(dtype: str) -> int:
    """Returns where a running sum of ones ends: 1 is half the spacing there."""
    return int(2 / formats.FORMATS[dtype].epsilon)


def _most_terms(op: str, dtype: str) -> int | None:
    """Returns how many terms are added well enough, None for any number.

    Measured on a CPU: a window of 256 equal numbers is exact in float16, one of 1024
    is off by 12 %; a sum of 2048 ones over a middle axis is exact, one of 4096 is
    2048. GPUs add in float32, but the sum itself still overflows.
    """
    if dtype not in HALF:
        return None
    if op in _RUNNING:
        return _stops_at(dtype)
    if dtype == "bfloat16":
        return None
    return _stops_at(dtype) // 4 if op in _POOLS else _stops_at(dtype)


def _num_terms(node: Node) -> int | None:
    """Returns how many numbers go into one result, None where it is not known."""
    if node.op in _POOLS:
        return math.prod(node.definition.attr["ksize"].list.i)
    shape, axes = node.shape(0), node.value(1)
    if shape is None or axes is None:
        return None
    # A batch of unknown size has at least one example.
    return math.prod(shape[int(axis)] or 1 for axis in axes.ravel())


@rule("vanishing-epsilon")
def vanishing_epsilon(subject: Subject) -> Iterator[Found]:
    """Epsilons of layers that are 0 in the dtype they are added in."""
    graph = subject.graph
    seen = set()
    for node in graph.of_type("AddV2", "Add", "Maximum"):
        dtype = node.dtype()
        layer = subject.layer_at(node.layer)
        if (
            dtype not in HALF
            or node.layer in seen
            or isinstance(layer, _TOLD_ELSEWHERE)
            or not _adds_nothing(node)
            or not _is_divided_by(graph, node)
        ):
            continue
        seen.add(node.layer)
        format = formats.FORMATS[dtype]
        values = [getattr(layer, name, None) for name in ("epsilon", "eps")]
        written = [float(v) for v in values if isinstance(v, (int, float))]
        text = f"{written[0]:g}" if written else "what is added"
        yield Found(
            "error",
            f"An epsilon guards a divisor, a root or a logarithm in {dtype}, but "
            f"{text} is 0 there: the smallest number is "
            f"{format.smallest_subnormal:.1e}. It guards nothing, and 0 / 0 is NaN.",
            # An epsilon with all digits of the format.
            f"Take an epsilon of at least {_round_up(format.smallest_normal):.0e}, or "
            "compute this part in float32 (`dtype='float32'`).",
            node.layer or None,
            written[0] if written else 0.0,
            {"dtype": dtype, "operation": node.name},
        )


def _adds_nothing(node: Node) -> bool:
    """States whether the second term is a constant 0.

    Not the first: `sum(tensors)` begins with 0.
    """
    value = node.value(1) if len(node.inputs) > 1 else None
    return value is not None and np.size(value) == 1 and float(np.ravel(value)[0]) == 0


def _is_divided_by(graph: Graph, node: Node) -> bool:
    return any(
        node in _behind(graph, reader, _DIVIDING[reader.op])
        for reader in graph.readers_past(node, _BEFORE_DIVIDING)
        if reader.op in _DIVIDING
    )


def _behind(graph: Graph, node: Node, index: int) -> list[Node]:
    """Returns what makes an input, and what that hands on or is the root of."""
    found: list[Node] = []
    each = graph.producer(node, index)
    while each is not None and each not in found:
        found.append(each)
        if each.op not in _BEFORE_DIVIDING:
            break
        each = graph.producer(each, 0)
    return found


def _round_up(value: float) -> float:
    """Returns the next power of 10."""
    return float(10.0 ** np.ceil(np.log10(value)))


@rule("optimizer-epsilon", needs=("optimizer",))
def optimizer_epsilon(subject: Subject) -> Iterator[Found]:
    """Epsilons of optimizers that are too small for the dtype of the weights."""
    for inner, dtype, parts in subject.optimized():
        smallest = formats.FORMATS[dtype].smallest_subnormal
        # Below its root the square of a gradient is 0, and epsilon alone divides.
        least = math.sqrt(smallest)
        # The second is Adafactor's and added to a square.
        for name, safe in (("epsilon", least), ("epsilon_1", smallest)):
            epsilon = getattr(inner, name, None)
            if not isinstance(epsilon, (int, float)) or not 0 < epsilon < safe:
                continue
            vanishes = epsilon <= smallest / 2
            size, update = "is small", "divided by epsilon alone"
            if vanishes:
                size, update = "is 0", "0 / 0 or inf"
            yield Found(
                "error" if vanishes else "warning",
                f"The {name} {epsilon:g} of {inner.name!r} {size} in {dtype}, in which "
                f"{len(parts)} layers store their weights: the squares of gradients "
                f"below {least:.1e} are 0 there, and the update is {update}.",
                f"Use the policy 'mixed_{dtype}', which keeps weights and moments in "
                f"float32, or pass `{name}={_round_up(safe):.0e}`.",
                parts[0].path,
                epsilon,
                {"dtype": dtype, "num_layers": len(parts)},
            )


@rule("constant-range")
def constant_range(subject: Subject) -> Iterator[Found]:
    """Constants beyond a format's range, above all in masks."""
    graph = subject.graph
    seen = set()
    for node, dtype, value in _beyond(graph):
        users = {reader.op for reader in graph.readers_past(node)}
        layer = subject.layer_at(node.layer)
        if users <= {"Minimum", "Maximum"} or isinstance(layer, _TOLD_ELSEWHERE):
            continue  # a limit that nothing reaches
        is_factor = "Mul" in users
        if (node.layer, is_factor) in seen:
            continue
        seen.add((node.layer, is_factor))
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
            f"A constant {came} in {dtype}, which ends at "
            f"{formats.FORMATS[dtype].max:.4g}: {effect}.",
            "Take a constant within the format, such as "
            f"{'-3e4' if dtype == 'float16' else '-1e9'}, or compute the mask in "
            "float32.",
            node.layer or None,
            value,
            {"dtype": dtype, "operation": node.name},
        )


def _beyond(graph: Graph) -> Iterator[tuple[Node, str, float]]:
    """Yields (operation, dtype, value) of constants that are infinite in a format."""
    for node in graph.nodes:
        if node.op == "Const" and node.dtype("dtype") in HALF:
            array = node.constant
            if array is not None and np.isinf(array).any():
                yield node, node.dtype("dtype"), float(array[np.isinf(array)].flat[0])
        elif node.op == "Cast" and node.dtype("DstT") in HALF:
            dtype = node.dtype("DstT")
            value = _largest_behind(graph, node)
            if value is not None and abs(value) > formats.FORMATS[dtype].max:
                yield node, dtype, value


def _largest_behind(graph: Graph, cast: Node) -> float | None:
    """Returns the largest constant that a cast meets: itself, or as a factor or term.

    Infinite ones were written so and are no fault of the format.
    """
    before = graph.producer(cast, 0)
    if before is None:
        return None
    candidates = [before]
    if before.op in ("Mul", "SelectV2", "Select", "AddV2", "Sub"):
        made = [graph.producer(before, i) for i in range(len(before.inputs))]
        candidates = [node for node in made if node is not None]
    arrays = [node.constant for node in candidates]
    finite = [a[np.isfinite(a)] for a in arrays if a is not None]
    values = [float(v) for a in finite for v in (a.min(), a.max())] if finite else []
    return max(values, key=abs, default=None)
