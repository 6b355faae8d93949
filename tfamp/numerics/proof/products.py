"""Products and casts of a trace, each with its layer."""

import collections
import dataclasses
import math
from collections.abc import Sequence

from tfamp.graph.bodies import Operation
from tfamp.graph.products import flops_of, is_product
from tfamp.numerics.proof.result import Cast, Product, Shape
from tfamp.stepping.step_traces import Marks, num_bytes, plain_name, product_dtype

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_VARIABLES = ("ReadVariableOp", "VarHandleOp")


def products_of(
    operations: Sequence[Operation], marks: Marks
) -> list[tuple[Operation, Product]]:
    """Returns the products and convolutions of a trace, those of replicas as one."""
    found: dict[tuple[object, ...], tuple[Operation, Product]] = {}
    for operation in filter(is_product, operations):
        product = Product(
            name=plain_name(operation.name),
            op_type=operation.op_type,
            layer=marks.layer_of(operation.name),
            direction="backward" if operation.is_backward else "forward",
            dtype=product_dtype(operation),
            shapes=_factors(operation),
            output_shape=operation.outputs[0] if operation.outputs else None,
            flops=flops_of(operation),
            count=operation.count,
            is_counted=operation.is_counted,
        )
        # Replicas have names that differ by the replica alone.
        parts = operation.name.split("/")
        name = "/".join(part for part in parts if not part.startswith("replica_"))
        key = name, product.shapes
        if key in found:
            operation, first = found[key]
            product = dataclasses.replace(first, count=first.count + product.count)
        found[key] = operation, product
    return list(found.values())


def casts_of(operations: Sequence[Operation], marks: Marks) -> tuple[Cast, ...]:
    """Returns the casts between floating-point dtypes, most bytes first."""
    casts = [each for each in operations if is_cast(each)]
    forward = {
        plain_name(each.name): each.sources[:1]
        for each in casts
        if not each.is_backward
    }
    totals: dict[tuple[str, ...], list[int]] = collections.defaultdict(lambda: [0] * 3)
    for each in casts:
        what = _what(each, forward)
        layer = marks.layer_of(each.name)
        total = totals[layer, what, each.dtype("SrcT"), each.dtype("DstT")]
        total[0] += each.count
        total[1] += each.count * math.prod(dim or 0 for dim in each.outputs[0] or (0,))
        total[2] += each.count * num_bytes(each)
    found = [Cast(*key, *total) for key, total in totals.items()]  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda cast: -cast.moved_bytes))


def is_cast(operation: Operation) -> bool:
    """States whether an operation casts floats that are more than a scalar."""
    return (
        operation.op_type == "Cast"
        and operation.dtype("SrcT") in _FLOATS
        and operation.dtype("DstT") in _FLOATS
        and operation.dtype("SrcT") != operation.dtype("DstT")
        and operation.outputs[0] != ()
    )


def _what(cast: Operation, forward: dict[str, tuple[str, ...]]) -> str:
    if not cast.is_backward:
        return "weights" if set(cast.sources[:1]) & set(_VARIABLES) else "activations"
    # The gradient of the cast "x" is "gradient_tape/x/Cast", of one in a loop
    # ".../gradients/x_grad/Cast".
    name = plain_name(cast.name).rpartition("/")[0].removesuffix("_grad")
    for before in ("gradient_tape/", "gradients/"):
        tail = name.rpartition(before)[2] if before in name else name
        if tail in forward:
            of_weights = set(forward[tail]) & set(_VARIABLES)
            return "weight gradients" if of_weights else "activation gradients"
    return "activation gradients"


def _factors(operation: Operation) -> tuple[Shape, ...]:
    """Returns the shapes of what is multiplied, without vectors of sizes."""
    if "Backprop" not in operation.op_type or len(operation.inputs) < 3:
        return operation.inputs[:2]
    # A gradient takes the shape of its result in place of one factor.
    if "Input" in operation.op_type:
        return operation.inputs[1:3]
    return (operation.inputs[0], operation.inputs[2])
