"""Matrix products and convolutions: which operations are, and their FLOPs."""

import math

from tfamp.graph.bodies import Operation, Shape

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


def is_product(operation: Operation) -> bool:
    """States whether an operation is a matrix product or a convolution."""
    if operation.op_type == "Einsum":
        return len(operation.inputs) == 2
    return (
        operation.op_type in MATRIX_PRODUCTS
        or operation.op_type in CONVOLUTIONS
        or operation.op_type in _RECURRENT
    )


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
    """Multiplies the sizes of the labels; those of "..." are ".-1" for its last, on."""
    equation = operation.attributes["equation"].s.decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    factors: list[dict[str, int | None]] = []
    for term, shape in zip(terms.split(","), operation.inputs, strict=True):
        if shape is None:
            return None
        before, dots, after = term.partition("...")
        sizes: dict[str, int | None] = dict(zip(before, shape, strict=False))
        if dots:
            end = len(shape) - len(after)
            middle = shape[len(before) : end]
            sizes |= {f".-{len(middle) - i}": size for i, size in enumerate(middle)}
            sizes |= dict(zip(after, shape[end:], strict=True))
        factors.append(sizes)
    first, second = factors
    known = {**first, **{k: v for k, v in second.items() if v is not None}}
    # What one factor alone has and the result has not is summed before the product.
    kept = {label for label in known if label[0] in result}
    both = (first.keys() & second.keys()) | kept
    return _times(2, *(size for label, size in known.items() if label in both))


def _recurrent(operation: Operation) -> int | None:
    """Counts cuDNN's recurrent layers, whose gradient does all for both factors."""
    inputs, state = operation.inputs[:2]
    if inputs is None or state is None:
        return None
    gates = _GATES[operation.attributes["rnn_mode"].s.decode()]
    directions = 1 + (operation.attributes["direction"].s == b"bidirectional")
    layers, units = state[0], state[-1]
    if layers is None or units is None or inputs[-1] is None:
        return None
    # The first layer reads the inputs, others both directions of the one before.
    read = directions * inputs[-1]
    read += (layers - directions) * directions * units
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
