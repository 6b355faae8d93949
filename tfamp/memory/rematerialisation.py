"""`tfamp.remat`: activations computed again in the backward pass, not kept."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from absl import logging

from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.optimizers import in_xla
from tfamp.keras_hooks.recompute import nodes_of, recomputed, replace_run, run_nodes

# A graph with fewer nodes is computed again as a whole, if at all.
_MIN_NODES = 4


def remat(model_or_layers: Any, *, enabled: bool = True) -> Any:
    """Computes activations again in the backward pass, in place, and keeps fewer.

    A training step then needs the memory of few layers at a time, and about a third
    more time. Losses, gradients and weights are those of the plain step to rounding:
    dropout draws the same mask again, moving averages are updated once. It works in
    every dtype, in `fit` and in loops of your own, eager, in graphs and under XLA.

    A graph is cut into segments where little passes from one to the next, models inside
    it likewise. Of a subclassed model each layer that holds others is one, or each
    layer where none does. The last one is not computed again: its gradient comes first.

    Args:
        model_or_layers: A model, a layer, or several layers; each layer is one segment.
        enabled: False gives everything its own way to compute back.

    Returns:
        What was given. It is not kept in saved files: call it again after loading.

    Raises:
        TypeError: It is no model, layer or sequence of layers.
        ValueError: At the first step, a layer draws random numbers or writes to
            variables past Keras.

    Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if not isinstance(model_or_layers, keras.Model):
        for layer in _layers_of(model_or_layers):
            _set(layer, enabled=enabled)
        return model_or_layers
    model = model_or_layers
    graph = structure.graph_of(model)
    for _, layer, _ in structure.walk(model):
        structure.replace_call(layer, None)
        if (inner := structure.graph_of(layer)) is not None:
            replace_run(inner, None)
        trainer.drop_traced_functions(layer)
    if enabled:
        if graph is not None:
            number = _cut_graph(model, graph)
        else:
            children = structure.children(model)
            chosen = [each for each in children if structure.children(each)] or children
            number = len(chosen)
            for layer in chosen:
                _set(layer, enabled=True)
        logging.info(
            "tfamp.remat: %d parts of %r are computed again in the backward pass.",
            *(number, model.name),
        )
    return model


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


class Segment(NamedTuple):
    """Consecutive nodes of a graph, and whether they are computed again."""

    nodes: Sequence[Any]
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    is_again: bool


def _cut_graph(model: Any, graph: Any) -> int:
    """Makes a model's graph run in segments; returns how many are computed again."""
    nodes, number = nodes_of(graph), 0

    def needed(place: int) -> list[Any]:
        behind = (x for node in nodes[place:] for x in node.input_tensors)
        return [*graph.outputs, *behind]

    edges, inner = [0], set()
    for place, node in enumerate([*nodes, None]):
        found = None if node is None else structure.graph_of(node.operation)
        if found is not None and len(nodes_of(found)) >= _MIN_NODES:
            number += _cut_graph(node.operation, found)
            inner.add(place)
        elif node is not None:
            continue
        start = edges[-1]
        edges += [start + each for each in _cuts(nodes[start:place], needed(place))]
        edges += [place] * (place > start) + [place + 1] * (place in inner)
    segments = []
    for start, end in itertools.pairwise(edges):
        own = nodes[start:end]
        made = {id(x): x for node in own for x in node.output_tensors}
        taken = {id(x): x for node in own for x in node.input_tensors}
        wanted = {id(x) for x in needed(end)}
        inputs = tuple(x for key, x in taken.items() if key not in made)
        outputs = tuple(x for key, x in made.items() if key in wanted)
        # The gradient of the last one comes first.
        is_again = start not in inner and end < len(nodes)
        segments.append(Segment(own, inputs, outputs, is_again))

    def run(tensors: dict[int, Any], operation_fn: Any) -> None:
        for segment in segments:
            if segment.is_again and all(id(x) in tensors for x in segment.inputs):
                _run_again(model, segment, tensors, operation_fn)
            else:
                run_nodes(segment.nodes, tensors, operation_fn)

    replace_run(graph, run)
    return number + sum(segment.is_again for segment in segments)


def _cuts(nodes: Sequence[Any], results: Sequence[Any]) -> list[int]:
    """Returns behind how many nodes each cut is, smaller ones first.

    As many segments as the square root of the nodes need the least memory where all are
    alike. A cut lies where the fewest bytes pass near the place that makes them equal.
    """

    def size(tensor: keras.KerasTensor) -> int:  # of one example
        return math.prod(each or 1 for each in tensor.shape)

    last = {id(x): len(nodes) for x in results}
    for place, node in reversed(list(enumerate(nodes))):
        for x in node.input_tensors:
            last.setdefault(id(x), place)
    alive: dict[int, int] = {}
    passing = []
    for place, node in enumerate(nodes):
        alive |= {id(x): size(x) for x in (*node.input_tensors, *node.output_tensors)}
        alive = {key: each for key, each in alive.items() if last.get(key, -1) > place}
        passing.append(sum(alive.values()))
    sums = [*itertools.accumulate(sum(map(size, n.output_tensors)) for n in nodes)]
    count, places = round(math.sqrt(len(nodes))), set()
    for number in range(1, count):
        off = [abs(each - sums[-1] * number / count) for each in sums]
        near = [p for p in range(len(nodes) - 1) if off[p] <= sums[-1] / count / 2]
        if near:
            places.add(min((passing[p], off[p], p) for p in near)[2] + 1)
    return sorted(places)


def _run_again(
    owner: Any, segment: Segment, tensors: dict[int, Any], operation_fn: Any
) -> None:
    def call(*values: Any) -> list[Any]:
        own = {id(x): y for x, y in zip(segment.inputs, values, strict=True)}
        run_nodes(segment.nodes, own, operation_fn)
        return [own[id(x)] for x in segment.outputs]

    called = {id(node.operation): node.operation for node in segment.nodes}
    layers = [x for x in called.values() if isinstance(x, keras.layers.Layer)]
    name = f"{layers[0].name} to {layers[-1].name}" if layers else "a segment"
    again = _again(call, owner, layers, name)
    outputs = again(*(tensors[id(x)] for x in segment.inputs))
    tensors |= {id(x): y for x, y in zip(segment.outputs, outputs, strict=True)}


def _layers_of(given: Any) -> list[keras.layers.Layer]:
    """Returns one layer or several as a list."""
    layers = [given] if isinstance(given, keras.layers.Layer) else given
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        if layers and all(isinstance(each, keras.layers.Layer) for each in layers):
            return list(layers)
    raise TypeError(
        f"Cannot rematerialize {given!r}; expected a Keras model, a layer, or a list "
        "of layers. Pass what `keras.Model(...)` gave, or `model.layers[1:-1]`."
    )
