"""Evaluates the small integers of a graph: shapes, counters, trips of a loop."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.graph.bodies import Body, Reference

# A loop is counted by running its counter; one that runs longer is not counted.
MAX_TRIPS = 100_000
# Larger constants are data, not counters.
_MAX_ELEMENTS = 64

Values = Mapping[int, Any]


def _of_vector(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a reduction of scalars and vectors, which is all that counters are."""
    return lambda array, axes: function(array) if np.ndim(array) < 2 else None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Add", "AddV2"), operator.add),
    **{"Sub": operator.sub, "Mul": operator.mul, "Neg": np.negative},
    **{"FloorDiv": np.floor_divide, "FloorMod": np.mod},
    **{"Maximum": np.maximum, "Minimum": np.minimum},
    **{"Less": np.less, "LessEqual": np.less_equal, "Equal": np.equal},
    **{"Greater": np.greater, "GreaterEqual": np.greater_equal},
    **{"NotEqual": np.not_equal, "LogicalAnd": np.logical_and},
    **{"LogicalOr": np.logical_or, "LogicalNot": np.logical_not},
    **dict.fromkeys(("Identity", "StopGradient", "PreventGradient"), np.asarray),
    **{"Squeeze": np.squeeze, "Pack": lambda *arrays: np.stack(arrays)},
    **{"Range": np.arange, "Max": _of_vector(np.max), "Min": _of_vector(np.min)},
    **{"Prod": _of_vector(np.prod), "Sum": _of_vector(np.sum)},
}


def evaluate(
    body: Body,
    reference: Reference,
    values: Values | None = None,
    known: dict[Reference, Any] | None = None,
) -> Any:
    """Returns the value of a tensor as an array, None where it is not constant.

    `values` are those of arguments, `known` what was computed with them.
    """
    known = {} if known is None else known
    if reference not in known:
        # A loop in the graph would be one of TensorFlow 1; it is not constant.
        known[reference] = None
        known[reference] = _compute(body, reference, values or {}, known)
    return known[reference]


def _compute(
    body: Body, reference: Reference, values: Values, known: dict[Reference, Any]
) -> Any:
    if reference.name in body.arguments:
        index = body.arguments[reference.name]
        return values.get(index, body.argument_values.get(index))
    node = body.nodes.get(reference.name)
    if node is None:
        return None
    if node.op == "Const":
        tensor = node.attr["value"].tensor
        size = math.prod(dim.size for dim in tensor.tensor_shape.dim)
        return tf.make_ndarray(tensor) if size <= _MAX_ELEMENTS else None
    inputs = body.inputs(node)
    if node.op in ("Shape", "Rank", "Size") and inputs:
        return _from_shape(node.op, body.shape(inputs[0]))
    if node.op in ("While", "StatelessWhile"):
        return _run_loop(body, node, reference.output)[1].get(reference.output)
    if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
        function = body.function(node.attr["f"].func.name)
        if function is None:
            return None
        result = function.results[reference.output]
        behind = function.arguments_behind(result)
        given = {i: evaluate(body, inputs[i], values, known) for i in behind}
        return evaluate(function, result, given)
    arrays = []
    for each in inputs:
        arrays.append(evaluate(body, each, values, known))
        if arrays[-1] is None:
            return None
    if node.op in _FUNCTIONS:
        return _FUNCTIONS[node.op](*arrays)
    if node.op == "Cast":
        return arrays[0].astype(tf.as_dtype(node.attr["DstT"].type).as_numpy_dtype)
    return _strided_slice(node, arrays) if node.op == "StridedSlice" else None


def num_trips(body: Body, node: tf.compat.v1.NodeDef) -> int | None:
    """Returns how often a While or StatelessWhile runs, None if data decide."""
    return _run_loop(body, node, None)[0]


def _run_loop(
    body: Body, node: tf.compat.v1.NodeDef, wanted: int | None
) -> tuple[int | None, Values]:
    """Returns the trips and the final values of what is counted and of `wanted`."""
    key = (node.name, wanted)
    if key in body.loops:
        return body.loops[key]
    # Its own value may be asked for while it is computed.
    body.loops[key] = None, {}
    condition = body.function(node.attr["cond"].func.name)
    step = body.function(node.attr["body"].func.name)
    if condition is None or step is None:
        return None, {}
    new = condition.arguments_behind(condition.results[0])
    new |= set() if wanted is None else {wanted}
    counted = set[int]()
    while new:  # with the variables that theirs depend on
        counted |= new
        behind = [step.arguments_behind(step.results[index]) for index in new]
        new = set[int]().union(*behind) - counted
    starts = body.inputs(node)
    values = {index: evaluate(body, starts[index]) for index in counted}
    for trips in range(MAX_TRIPS):
        goes_on = evaluate(condition, condition.results[0], values)
        if goes_on is None:
            break
        if not np.all(goes_on):
            body.loops[key] = trips, values
            break
        values = {i: evaluate(step, step.results[i], values) for i in counted}
    return body.loops[key]


def _from_shape(op: str, shape: tuple[int | None, ...] | None) -> Any:
    if shape is None:
        return None
    if op == "Rank":
        return np.asarray(len(shape))
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        return None
    return np.asarray(sizes if op == "Shape" else math.prod(sizes))


def _strided_slice(node: tf.compat.v1.NodeDef, arrays: list[Any]) -> Any:
    """Returns a part of a vector, as `shape[0]` and `shape[1:]` make it."""
    vector, begin, end, strides = (np.atleast_1d(array) for array in arrays)
    if vector.ndim != 1 or len(begin) != 1 or node.attr["ellipsis_mask"].i:
        return None
    if node.attr["shrink_axis_mask"].i & 1:
        return vector[int(begin[0])]
    first = None if node.attr["begin_mask"].i & 1 else int(begin[0])
    last = None if node.attr["end_mask"].i & 1 else int(end[0])
    return vector[first : last : int(strides[0])]
