"""The sizes that matrix units see: rows, columns and inner size of each product."""

import math

from tfamp.graph.bodies import Shape
from tfamp.graph.operation import Operation
from tfamp.graph.products import CONVOLUTIONS, MATRIX_PRODUCTS, einsum_sizes

# Sizes by name; those that the graph does not tell are left out.
Sizes = dict[str, int]


def sizes_of(operation: Operation) -> Sizes:
    """Returns the sizes of a product that tensor cores want to be multiples of 8.

    Args:
        operation: A matrix product or convolution of the forward pass.

    Returns:
        Of a matrix product "rows" (batch and positions), "inputs" (what is summed
        over) and "units" (columns); of a convolution "channels in" (of a group) and
        "channels out". Nothing of a depthwise one, which no matrix unit computes.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.graph.operations import read_operations
        >>> matmul = tf.function(lambda x, y: tf.matmul(x, y))
        >>> specs = tf.TensorSpec((32, 27)), tf.TensorSpec((27, 10))
        >>> _, _, product, _ = read_operations(matmul.get_concrete_function(*specs))
        >>> sizes_of(product)
        {'rows': 32, 'inputs': 27, 'units': 10}

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section 4.1, and
    Convolutional Layers User's Guide, section 3.1 (2023).
    """
    if operation.op_type in MATRIX_PRODUCTS:
        return _known(_matrix_product(operation))
    if operation.op_type == "Einsum" and len(operation.inputs) == 2:
        return _known(_einsum(operation))
    if operation.op_type in CONVOLUTIONS:
        return _known(_convolution(operation))
    return {}


def _known(sizes: dict[str, int | None]) -> Sizes:
    return {name: size for name, size in sizes.items() if size is not None}


def _matrix_product(operation: Operation) -> dict[str, int | None]:
    flags = operation.attributes
    a, b = operation.inputs[:2]
    left = flags["transpose_a"].b or flags["adj_x"].b
    right = flags["transpose_b"].b or flags["adj_y"].b
    inner = _at(a, -2 if left else -1)
    sizes = {
        "rows": _at(a, -1 if left else -2),
        "inputs": _at(b, -1 if right else -2) if inner is None else inner,
        "units": _at(b, -2 if right else -1),
    }
    # A kernel of rank 2 is one product for all positions of all examples.
    if a is not None and len(a) > 2 and b is not None and len(b) == 2:
        positions = [size for size in a[:-1] if size is not None]
        whole = len(positions) == len(a) - 1
        sizes["rows"] = math.prod(positions) if whole else None
    return sizes


def _einsum(operation: Operation) -> dict[str, int | None]:
    factors = einsum_sizes(operation)
    if factors is None:
        return {}
    first, second, result = factors
    groups: dict[str, list[int | None]] = {"rows": [], "inputs": [], "units": []}
    for label, size in {**second, **first}.items():
        if label in first and label in second:
            if label not in result:
                groups["inputs"].append(size)
        elif label in result:
            groups["rows" if label in first else "units"].append(size)
    return {
        name: None if None in sizes else math.prod(size for size in sizes if size)
        for name, sizes in groups.items()
    }


def _convolution(operation: Operation) -> dict[str, int | None]:
    if operation.op_type.startswith("Depthwise"):
        return {}
    kernel = operation.inputs[1] if len(operation.inputs) > 1 else None
    if operation.op_type.endswith(("Filter", "FilterV2")):
        kernel = operation.outputs[0]
    if kernel is None:
        return {}
    return {"channels in": kernel[-2], "channels out": kernel[-1]}


def _at(shape: Shape, index: int) -> int | None:
    return shape[index] if shape is not None and len(shape) >= 2 else None
