"""Reads the operations that a traced function runs, those in its functions too."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfamp.graph.bodies import (
    Body,
    Operation,
    functions_of,
    output_shape,
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
    Those of a loop count as often as a counter lets it run; of the branches of a
    condition the dearest counts.
    """
    return tuple(_walk(read_bodies(concrete), "", 1, True))


def _walk(body: Body, prefix: str, count: int, known: bool) -> Iterator[Operation]:
    for node in body.live():
        name = node.name
        if prefix and not name.startswith(prefix):
            name = f"{prefix}/{name}"
        names = list(functions_of(node))
        called = list(filter(None, map(body.function, names)))
        if not names:
            yield _operation(body, node, name, count, known)
        elif node.op in _BRANCHES:
            walked = [list(_walk(each, name, count, known)) for each in called]
            yield from max(walked, key=_cost, default=[])
        elif node.op in _LOOPS:
            trips = num_trips(body, node)
            step = body.function(node.attr["body"].func.name)
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
    num_outputs = len(node.attr["_output_shapes"].list.shape)
    return Operation(
        *(name, node.op),
        inputs=tuple(map(body.shape, inputs)),
        outputs=tuple(output_shape(node, index) for index in range(num_outputs)),
        attributes=node.attr,
        sources=tuple(source.op if source is not None else "" for source in sources),
        count=count,
        is_counted=known,
    )
