"""Reads the operations that a traced function runs, those in its functions too."""

from collections.abc import Iterator
from typing import Any

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
from tfamp.graph.products import flops_of

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
