"""The operations that a traced function runs, and the FLOPs of its products."""

import math
from collections.abc import Iterator
from typing import Any

import opt_einsum
import tensorflow as tf

from tfamp.graph import bodies
from tfamp.graph.bodies import LOOPS, Body, Operation, Shape

MATRIX_PRODUCTS = frozenset(
    ("MatMul", "SparseMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
)
# Type -> (input that is counted along, or "output"; input that holds the kernel).
_FORWARD = ("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative")
_BACK = ("Conv2DBackprop", "Conv3DBackprop", "DepthwiseConv2dNativeBackprop")
_CONVOLUTIONS: dict[str, tuple[int | str, int | str]] = {
    **dict.fromkeys(_FORWARD, ("output", 1)),
    **{f"{each}Input{v}": (2, 1) for each in _BACK for v in ("", "V2")},
    **{f"{each}Filter{v}": (2, "output") for each in _BACK for v in ("", "V2")},
}
CONVOLUTIONS = frozenset(_CONVOLUTIONS)
_RECURRENT = frozenset(
    f"CudnnRNN{kind}{version}"
    for kind in ("", "Backprop")
    for version in ("", "V2", "V3")
)
_GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


_PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS | _RECURRENT


def is_product(operation: Operation) -> bool:
    """States whether an operation is a matrix product or a convolution."""
    is_einsum = operation.op_type == "Einsum" and len(operation.inputs) == 2
    return is_einsum or operation.op_type in _PRODUCTS


def flops_of(operation: Operation) -> int | None:
    """Returns the floating-point operations of a run, None where shapes are unknown.

    Two for a multiply-add of matrix products and convolutions; others give 0.
    """
    if not is_product(operation):
        return 0
    if operation.op_type in MATRIX_PRODUCTS:
        return _times(2, _size(operation.outputs[0]), _inner_size(operation))
    if operation.op_type == "Einsum":
        return _einsum(operation)
    if operation.op_type in CONVOLUTIONS:
        return _convolution(operation)
    return _recurrent(operation)


def _times(*factors: int | None) -> int | None:
    """Returns the product, None where a factor is not known."""
    if any(factor is None for factor in factors):
        return None
    return math.prod(factor for factor in factors if factor is not None)


def _size(shape: Shape) -> int | None:
    return None if shape is None else _times(*shape)


def _convolution(operation: Operation) -> int | None:
    shapes = dict(enumerate(operation.inputs)) | {"output": operation.outputs[0]}
    along, kernel = (shapes[place] for place in _CONVOLUTIONS[operation.op_type])
    if kernel is None:
        return None
    # A kernel is (..., channels in a group, channels out); a depthwise one is
    # (..., channels, multiplier) and sums over its window alone.
    summed = kernel[: -2 if operation.op_type.startswith("Depthwise") else -1]
    return _times(2, _size(along), _size(summed))


def _einsum(operation: Operation) -> int | None:
    """Multiplies the sizes of all labels."""
    shapes = [shape for shape in operation.inputs if shape and None not in shape]
    if len(shapes) < len(operation.inputs):
        return None
    equation = operation.attributes["equation"].s.decode()
    _, found = opt_einsum.contract_path(equation, *shapes, shapes=True)
    return 2 * math.prod(found.size_dict.values())


def _recurrent(operation: Operation) -> int | None:
    """Counts cuDNN's recurrent layers, whose gradient does all for both factors."""
    inputs, state = operation.inputs[:2]
    if inputs is None or state is None or None in (state[0], state[-1], inputs[-1]):
        return None
    gates = _GATES[operation.attributes["rnn_mode"].s.decode()]
    directions = 1 + (operation.attributes["direction"].s == b"bidirectional")
    layers, units = int(state[0] or 0), int(state[-1] or 0)
    # The first layer reads the inputs, others both directions of the one before.
    read = (
        directions * int(inputs[-1] or 0) + (layers - directions) * directions * units
    )
    times = 2 if "Backprop" in operation.op_type else 1
    each = 2 * gates * units * (read + layers * units) * times
    return _times(inputs[0], inputs[1], each)


def _inner_size(operation: Operation) -> int | None:
    """Returns how many terms a matrix product sums for each number."""
    flags = operation.attributes
    left = -2 if flags["transpose_a"].b or flags["adj_x"].b else -1
    right = -1 if flags["transpose_b"].b or flags["adj_y"].b else -2
    # In the gradient of a loop one factor comes off a stack without a shape.
    for shape, index in zip(operation.inputs[:2], (left, right), strict=True):
        if shape is not None and len(shape) >= 2 and shape[index] is not None:
            return shape[index]
    return None


_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
# Their functions run outside of the step, in the input pipeline.
_NOT_FOLLOWED = ("Dataset", "Iterator")


def read_operations(concrete: Any) -> tuple[Operation, ...]:
    """Returns the operations that one call of a traced, concrete function runs.

    Operations whose result nobody uses are left out, as TensorFlow leaves them out.
    Those of a loop count for each entry of the list that it reads; of the branches of a
    condition the dearest counts.
    """
    return tuple(_walk(bodies.read_bodies(concrete), "", 1, True))


def _walk(body: Body, prefix: str, count: int, known: bool) -> Iterator[Operation]:
    for node in body.live:
        name = node.name
        if prefix and not name.startswith(prefix):
            name = f"{prefix}/{name}"
        names = list(bodies.functions_of(node))
        called = list(filter(None, map(body.functions.get, names)))
        if not names:
            sources = [body.nodes.get(each.name) for each in body.inputs(node)]
            yield Operation(
                *(name, node.op),
                inputs=tuple(map(body.shape, body.inputs(node))),
                outputs=tuple(
                    bodies.output_shape(node, index)
                    for index in range(len(node.attr["_output_shapes"].list.shape))
                ),
                attributes=node.attr,
                sources=tuple(each.op if each is not None else "" for each in sources),
                count=count,
                is_counted=known,
            )
        elif node.op in _BRANCHES:
            walked = [list(_walk(each, name, count, known)) for each in called]
            yield from max(walked, key=_cost, default=[])
        elif node.op in LOOPS:
            trips = body.num_trips(node)
            step = body.functions.get(node.attr["body"].func.name)
            if step is not None:
                times = count if trips is None else count * trips
                is_known = known and trips is not None
                yield from _walk(_called(body, node, step), name, times, is_known)
        elif not any(part in node.op for part in _NOT_FOLLOWED):
            for function in called:
                yield from _walk(_called(body, node, function), name, count, known)


def _cost(operations: list[Operation]) -> tuple[int, int]:
    flops = sum((flops_of(each) or 0) * each.count for each in operations)
    return flops, len(operations)


def _called(body: Body, node: tf.compat.v1.NodeDef, function: Body) -> Body:
    """Tells a function the shapes that it is called with, where it does not know."""
    for index, reference in enumerate(body.inputs(node)):
        function.argument_shapes.setdefault(index, body.shape(reference))
    return function
