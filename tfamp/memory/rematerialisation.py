"""`tfamp.remat`: activations computed again in the backward pass, not kept."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from absl import logging

from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.optimizers import in_xla
from tfamp.keras_hooks.recompute import recomputed
from tfamp.memory.segments import Segment, cut

# A graph with fewer nodes is computed again as a whole, if at all.
_MIN_NODES = 4


def remat(
    model_or_layers: Any,
    *,
    enabled: bool = True,
) -> Any:
    """Computes activations again in the backward pass, in place, and keeps fewer.

    A training step then needs the memory of few layers at a time, and about a third
    more time. Losses, gradients and weights are those of the plain step to rounding:
    dropout draws the same mask again, moving averages are updated once. It works in
    every dtype, in `fit` and in loops of your own, eager, in graphs and under XLA.

    A Functional or Sequential model is cut into segments of several layers, where
    little passes from one to the next; models inside it are cut likewise. Of a
    subclassed model each layer that holds others is one, or each layer where none does.
    The last segment is not computed again, as its gradient comes first.

    Args:
        model_or_layers: A model, a layer, or several layers; each layer is one segment.
        enabled: False gives everything its own way to compute back.

    Returns:
        What was given. It is not kept in saved files: call it again after loading.

    Raises:
        TypeError: It is no model, layer or sequence of layers.
        ValueError: At the first step, a layer draws random numbers or writes to
            variables past Keras.

    Example:
        >>> layers = [keras.layers.Dense(8, activation="relu") for _ in range(12)]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model.compile("sgd", "mse")
        >>> remat(model) is model
        True

    Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if not isinstance(model_or_layers, keras.Model):
        for layer in _layers_of(model_or_layers):
            _set(layer, enabled=enabled)
        return model_or_layers
    model = model_or_layers
    graph = structure.graph_of(model)
    _clear(model)
    if enabled and graph is not None:
        _tell(model, _cut_graph(model, graph), "segments")
    elif enabled:
        children = structure.children(model)
        chosen = [layer for layer in children if structure.children(layer)] or children
        for layer in chosen:
            _set(layer, enabled=True)
        _tell(model, len(chosen), "layers")
    for _, layer, _ in structure.walk(model):
        trainer.drop_traced_functions(layer)
    return model


def _clear(model: keras.Model) -> None:
    for _, layer, _ in structure.walk(model):
        structure.replace_call(layer, None)
        graph = structure.graph_of(layer)
        if graph is not None:
            structure.replace_run(graph, None)


def _set(layer: keras.layers.Layer, *, enabled: bool) -> None:
    """Makes one layer a segment of its own."""
    structure.replace_call(layer, None)
    if enabled:
        call = _again(layer.call, layer, [layer], layer.name)
        structure.replace_call(layer, call)


def _again(
    call: Callable[..., Any],
    owner: keras.layers.Layer,
    layers: Sequence[keras.layers.Layer],
    name: str,
) -> Callable[..., Any]:
    """Returns what stands for a call of some layers."""

    def is_ready() -> bool:
        inside = (x for layer in layers for _, x, _ in structure.walk(layer))
        return all(layer.built for layer in inside)

    return recomputed(
        call, owner=owner, layers=layers, name=name, is_ready=is_ready, in_xla=in_xla
    )


def _tell(model: keras.Model, count: int, what: str) -> None:
    logging.info(
        "tfamp.remat: %d %s of %r are computed again in the backward pass.",
        count,
        what,
        model.name,
    )


def _cut_graph(model: Any, graph: Any) -> int:
    """Makes a model's graph run in segments; returns how many are computed again."""
    nodes = structure.nodes_of(graph)
    inner = {
        id(node): (node.operation, found)
        for node in nodes
        if (found := structure.graph_of(node.operation)) is not None
        and len(structure.nodes_of(found)) >= _MIN_NODES
    }
    steps: list[tuple[Segment, bool]] = []
    num_inner = sum(_cut_graph(*each) for each in inner.values())
    start = 0
    for place in (*(i for i, n in enumerate(nodes) if id(n) in inner), len(nodes)):
        results = _needed(nodes[place:], graph.outputs)
        if place > start:
            part = nodes[start:place]
            found = cut(part, results)
            is_end = place == len(nodes)
            steps += [
                (segment, not (is_end and segment is found[-1])) for segment in found
            ]
        if place < len(nodes):
            behind = _needed(nodes[place + 1 :], graph.outputs)
            steps += [(segment, False) for segment in cut([nodes[place]], behind, 1)]
        start = place + 1
    structure.replace_run(graph, _runner(model, steps))
    return num_inner + sum(is_again for _, is_again in steps)


def _needed(nodes: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    return [*outputs, *(x for node in nodes for x in node.input_tensors)]


def _runner(owner: Any, steps: Sequence[tuple[Segment, bool]]) -> Callable[..., None]:
    def run(tensors: dict[int, Any], operation_fn: Any) -> None:
        for segment, is_again in steps:
            if not is_again or any(id(x) not in tensors for x in segment.inputs):
                structure.run_nodes(segment.nodes, tensors, operation_fn)
            else:
                _run_again(owner, segment, tensors, operation_fn)

    return run


def _run_again(
    owner: Any, segment: Segment, tensors: dict[int, Any], operation_fn: Any
) -> None:
    def call(*values: Any) -> list[Any]:
        own = {id(x): y for x, y in zip(segment.inputs, values, strict=True)}
        structure.run_nodes(segment.nodes, own, operation_fn)
        return [own[id(x)] for x in segment.outputs]

    names = [layer.name for layer in segment.layers]
    name = f"{names[0]} to {names[-1]}" if names else "a segment"
    again = _again(call, owner, segment.layers, name)
    outputs = again(*(tensors[id(x)] for x in segment.inputs))
    for x, y in zip(segment.outputs, outputs, strict=True):
        tensors[id(x)] = y


def _layers_of(given: Any) -> list[keras.layers.Layer]:
    """Returns one layer or several as a list."""
    layers = [given] if isinstance(given, keras.layers.Layer) else given
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        if layers and all(isinstance(each, keras.layers.Layer) for each in layers):
            return list(layers)
    raise TypeError(
        f"Cannot rematerialise {given!r}; expected a Keras model, a layer, or a list "
        "of layers. Pass what `keras.Model(...)` gave, or `model.layers[1:-1]`."
    )
