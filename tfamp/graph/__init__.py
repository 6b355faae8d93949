"""Reads the operations that a traced function runs, those in its functions too."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.bodies import (
    Body,
    Operation,
    functions_of,
    output_shape,
    plain_type,
    read_bodies,
)
from tfamp.graph.constants import evaluate, num_trips
from tfamp.graph.products import flops_of, is_product

_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
# Their functions run outside of the step, in the input pipeline.
_NOT_FOLLOWED = ("Dataset", "Iterator")


def read_operations(concrete: Any) -> tuple[Operation, ...]:
    """Returns the operations that one call of a traced, concrete function runs.

    Operations whose result nobody uses are left out, as TensorFlow leaves them out.
    Loops are followed and their operations counted as often as they run, where a
    counter ends the loop. Of the branches of a condition the dearest counts. TensorFlow
    fuses and moves operations afterwards; it changes neither what is multiplied nor,
    unless its own mixed precision is on, in which dtype.

    Example:
        >>> matmul = tf.function(lambda x: tf.matmul(x, x))
        >>> traced = matmul.get_concrete_function(tf.TensorSpec((2, 2)))
        >>> [each.op_type for each in read_operations(traced)]
        ['Placeholder', 'MatMul', 'Identity']
    """
    return tuple(_walk(read_bodies(concrete), "", 1, True))


def _walk(body: Body, prefix: str, count: int, known: bool) -> Iterator[Operation]:
    for node in body.live():
        name = node.name
        if prefix and not name.startswith(prefix):
            name = f"{prefix}/{name}"
        called = list(functions_of(node))
        if not called:
            yield _operation(body, node, name, count, known)
        elif node.op in _LOOPS:
            trips = num_trips(body, node)
            step = body.function(node.attr["body"].func.name)
            if step is not None:
                times = count * (1 if trips is None else trips)
                yield from _walk(
                    _called(body, node, step), name, times, known and trips is not None
                )
        elif node.op in _BRANCHES:
            yield from _branch(body, node, name, count, known)
        elif not any(part in node.op for part in _NOT_FOLLOWED):
            for each in called:
                function = body.function(each)
                if function is not None:
                    inner = _called(body, node, function)
                    yield from _walk(inner, name, count, known)


def _branch(
    body: Body, node: tf.compat.v1.NodeDef, name: str, count: int, known: bool
) -> Iterator[Operation]:
    """Yields the operations of the branch that runs, or may run."""
    condition, *_ = body.inputs(node)
    chosen = evaluate(body, condition)
    names = list(functions_of(node))
    if node.op in ("If", "StatelessIf"):
        names = [node.attr[key].func.name for key in ("then_branch", "else_branch")]
        chosen = None if chosen is None else int(not chosen)
    branches = [function for each in names if (function := body.function(each))]
    if chosen is not None and 0 <= int(chosen) < len(branches):
        branches = [branches[int(chosen)]]
    walked = [list(_walk(each, name, count, known)) for each in branches]

    def cost(operations: list[Operation]) -> tuple[int, int]:
        flops = sum((flops_of(each) or 0) * each.count for each in operations)
        return flops, len(operations)

    yield from max(walked, key=cost, default=[])


def _called(body: Body, node: tf.compat.v1.NodeDef, function: Body) -> Body:
    """Tells a function what it is called with, where it does not know."""
    for index, reference in enumerate(body.inputs(node)):
        function.argument_shapes.setdefault(index, body.shape(reference))
        # A variable of a loop has the value that it starts with only if it keeps it.
        if node.op not in _LOOPS or function.hands_on(index):
            function.argument_values[index] = evaluate(body, reference)
    return function


def _operation(
    body: Body, node: tf.compat.v1.NodeDef, name: str, count: int, known: bool
) -> Operation:
    inputs = body.inputs(node)
    sources = [body.nodes.get(reference.name) for reference in inputs]
    return Operation(
        name,
        plain_type(node.op),
        inputs=tuple(body.shape(reference) for reference in inputs),
        outputs=tuple(
            output_shape(node, index)
            for index in range(len(node.attr["_output_shapes"].list.shape))
        ),
        attributes=node.attr,
        sources=tuple(source.op if source is not None else "" for source in sources),
        count=count,
        is_counted=known,
    )


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Floating-point operations, two a multiply-add, and names of what is not known.

    Of those the graph does not tell shapes or the number of runs: without shapes one
    counts 0, in a loop that data end once.
    """

    flops: int
    uncounted: tuple[str, ...] = ()


def count_flops(concrete: Any) -> FlopCount:
    """Returns the floating-point operations of one call of a concrete function.

    Example:
        >>> matmul = tf.function(lambda x: tf.matmul(x, x))
        >>> traced = matmul.get_concrete_function(tf.TensorSpec((2, 2)))
        >>> count_flops(traced).flops
        16
    """
    total, uncounted = 0, []
    for operation in read_operations(concrete):
        if not is_product(operation):
            continue
        flops = flops_of(operation)
        total += (flops or 0) * operation.count
        if flops is None or not operation.is_counted:
            uncounted.append(operation.name)
    return FlopCount(total, tuple(uncounted))


def forward_flops(model: keras.layers.Layer, batch: Any) -> int:
    """Returns the floating-point operations of one forward pass in training mode.

    Matrix products and convolutions of the whole batch count, two for a multiply-add. A
    training step takes about three times as many. The model is traced once, which takes
    as long as the first step of `fit` without compiling, and no step is run; one that
    is not built is built. The batch has no targets; `tf.TensorSpec`s are enough. A loop
    that data end counts once, and a warning says so.

    Example:
        >>> forward_flops(keras.layers.Dense(4), tf.zeros((8, 2)))  # 2 * 8 * 2 * 4
        128
    """

    @tf.function
    def forward(x: Any) -> Any:
        return model(x, training=True)

    counted = count_flops(
        forward.get_concrete_function(tf.nest.map_structure(_spec, batch))
    )
    if counted.uncounted:
        warnings.warn(
            f"The FLOPs of {len(counted.uncounted)} operations of {model.name!r} are "
            f"not known, the first is {counted.uncounted[0]!r}: their shapes or the "
            "number of times their loop runs depend on data. Each counts at most once, "
            "so the true number is higher.",
            stacklevel=2,
        )
    return counted.flops


def _spec(x: Any) -> Any:
    """Returns the shape and dtype of what a batch holds."""
    if isinstance(x, tf.TypeSpec):
        return x
    if isinstance(x, tf.Tensor) or not tf.is_tensor(x):
        tensor = tf.convert_to_tensor(x)
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    return tf.type_spec_from_value(x)
