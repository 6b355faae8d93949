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

    Two for a multiply-add; zeros of a padding are multiplied too. Only matrix products
    and convolutions count, since they are what matrix units speed up; others give 0.
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


def _size(shape: Shape) -> int | None:
    return None if shape is None else _times(*shape)


def _times(*factors: int | None) -> int | None:
    """Returns the product, None where a factor is not known."""
    if any(factor is None for factor in factors):
        return None
    return math.prod(factor for factor in factors if factor is not None)


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
    factors = _einsum_sizes(operation)
    if factors is None:
        return None
    first, second, result = factors
    known = {**first, **{k: v for k, v in second.items() if v is not None}}
    # What one factor alone has and the result has not is summed before the product.
    both = first.keys() & second.keys()
    return _times(2, *(known[label] for label in known if label in both | result))


def _einsum_sizes(
    operation: Operation,
) -> tuple[dict[str, int | None], dict[str, int | None], set[str]] | None:
    """Returns the sizes of both factors' labels in an Einsum, and its result's labels.

    None where the rank of a factor is not known. The labels of "..." are ".-1" for its
    last dimension, ".-2" for the one before, and on.
    """
    equation = operation.attributes["equation"].s.decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    sizes: list[dict[str, int | None]] = []
    for term, shape in zip(terms.split(","), operation.inputs, strict=True):
        if shape is None:
            return None
        sizes.append(_label_sizes(term, shape))
    first, second = sizes
    kept = {label for label in {*first, *second} if label[0] in result}
    return first, second, kept


def _label_sizes(term: str, shape: tuple[int | None, ...]) -> dict[str, int | None]:
    """Returns the size of each label of one factor; "..." gives ".-1", ".-2" and on."""
    before, dots, after = term.partition("...")
    sizes: dict[str, int | None] = dict(zip(before, shape, strict=False))
    if dots:
        middle = shape[len(before) : len(shape) - len(after)]
        sizes |= {f".-{len(middle) - i}": size for i, size in enumerate(middle)}
        sizes |= dict(zip(after, shape[len(shape) - len(after) :], strict=True))
    return sizes


def _recurrent(operation: Operation) -> int | None:
    """Counts cuDNN's recurrent layers: (time, batch, features), (layers, batch, units).

    The gradient computes each product twice, for the inputs and for the weights.
    """
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
    a, b = operation.inputs[:2]
    left = flags["transpose_a"].b or flags["adj_x"].b
    right = flags["transpose_b"].b or flags["adj_y"].b
    inner = _at(a, -2 if left else -1)
    # In the gradient of a loop one factor comes off a stack without a shape.
    return _at(b, -1 if right else -2) if inner is None else inner


def _at(shape: Shape, index: int) -> int | None:
    return shape[index] if shape is not None and len(shape) >= 2 else None
