"""Runs the nodes of a Functional graph, all or some of them.

Relies on: `Functional._run_through_graph(inputs, operation_fn, call_fn=None)` being
how a graph is called; `_nodes_by_depth` giving the order; `node.arguments.fill_in`
giving the arguments of a node from tensors by their `id`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from keras.src import tree
from keras.src.models.functional import Functional

# Gives what stands for an operation, such as one with `training` filled in.
OperationFn = Callable[[Any], Callable[..., Any]]


def nodes_of(graph: Functional) -> list[Any]:
    """Returns the nodes of a graph in the order they run, inputs left out."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    return [
        node
        for depth in depths
        for node in graph._nodes_by_depth[depth]
        if node.operation and not node.is_input
    ]


def run_nodes(
    nodes: Iterable[Any], tensors: dict[int, Any], operation_fn: OperationFn
) -> None:
    """Calls nodes one after the other.

    Args:
        nodes: What to call; those whose inputs are missing are left out.
        tensors: Values of the graph's tensors by their `id`; outputs are added.
        operation_fn: Gives what is called for an operation.
    """
    for node in nodes:
        if any(id(x) not in tensors for x in node.input_tensors):
            continue
        args, kwargs = node.arguments.fill_in(tensors)
        outputs = operation_fn(node.operation)(*args, **kwargs)
        for x, y in zip(node.outputs, tree.flatten(outputs), strict=False):
            tensors[id(x)] = y


def replace_run(
    graph: Functional,
    run: Callable[[dict[int, Any], OperationFn], None] | None,
) -> None:
    """Makes a graph run another way, or its own way again.

    Args:
        graph: The graph of a model.
        run: Gets the inputs by the `id` of the graph's tensors and adds all that the
            graph gives; None takes an earlier one away.
    """
    vars(graph).pop("_run_through_graph", None)
    if run is None:
        return
    original = graph._run_through_graph

    def _run_through_graph(
        inputs: Any, operation_fn: OperationFn = lambda op: op, call_fn: Any = None
    ) -> Any:
        if call_fn is not None:
            return original(inputs, operation_fn, call_fn)
        given = zip(graph.inputs, tree.flatten(inputs), strict=False)
        tensors = {id(x): y for x, y in given}
        run(tensors, operation_fn)
        if any(id(x) not in tensors for x in graph.outputs):
            return original(inputs, operation_fn)  # which says what is not connected
        return tree.pack_sequence_as(
            graph._outputs_struct, [tensors[id(x)] for x in graph.outputs]
        )

    # Past `__setattr__`, by which Keras tracks what is assigned.
    vars(graph)["_run_through_graph"] = _run_through_graph


def replace_call(layer: Any, call: Callable[..., Any] | None) -> None:
    """Makes a layer's `call` another one, or its own again where it is None."""
    vars(layer).pop("call", None)
    if call is not None:
        vars(layer)["call"] = call
