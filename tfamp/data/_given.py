"""What a dataset of the user's does on its own, as far as its parts tell.

TensorFlow has no public way to ask a dataset what it is made of but to write it as a
graph, arrays included, which takes 17 s and 4 GiB for 1 GB. So its own objects are
looked at; where a release names their attributes otherwise, nothing is found.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

_SHUFFLES = ("ShuffleDataset", "ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2")
_RANDOM = ("RandomDataset", "RandomDatasetV2")


@dataclasses.dataclass(frozen=True)
class Order:
    """In how far elements come in one order.

    Attributes:
        varies: What puts them in another order in each pass, "" for nothing found.
        differs: What puts them in another order in each process, as it has no seed.
    """

    varies: str = ""
    differs: str = ""


def order_of(dataset: tf.data.Dataset) -> Order:
    """Returns in how far the elements of a dataset come in one order.

    Example:
        >>> numbers = tf.data.Dataset.range(9)
        >>> order_of(numbers.shuffle(9, seed=1)).varies
        'a shuffle'
        >>> order_of(numbers)
        Order(varies='', differs='')
    """
    order = Order()
    for part in _parts(dataset):
        for found in (_own_order(part), *map(_order_in, _graphs(part))):
            order = Order(order.varies or found.varies, order.differs or found.differs)
    return order


def runs_python(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has a Python generator in it, which may end for good.

    Example:
        >>> spec = tf.TensorSpec((), tf.int32)
        >>> runs_python(tf.data.Dataset.from_generator(list, output_signature=spec))
        True
        >>> runs_python(tf.data.Dataset.range(9))
        False
    """
    return any(
        node.op == "GeneratorDataset"
        for part in _parts(dataset)
        for graph in _graphs(part)
        for node in _nodes(graph)
    )


def _parts(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all that it is made of."""
    rest = [dataset]
    while rest:
        part = rest.pop()
        yield part
        rest += getattr(part, "_inputs", list)()


def _graphs(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the graphs of the functions that a dataset calls itself."""
    for one in getattr(dataset, "_functions", list)():
        graph = getattr(getattr(one, "function", None), "graph", None)
        if graph is not None:
            yield graph.as_graph_def()


def _nodes(graph: Any) -> Iterator[Any]:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _own_order(dataset: tf.data.Dataset) -> Order:
    """Returns in how far a dataset itself keeps an order."""
    kind = type(dataset).__name__.lstrip("_")
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    no_seed = all(seed is not None and int(seed) == 0 for seed in seeds)
    if kind in _SHUFFLES:
        varies = getattr(dataset, "_reshuffle_each_iteration", True) is not False
        return Order("a shuffle" if varies else "", "a shuffle" if no_seed else "")
    if kind in _RANDOM:
        return Order("", "a random choice" if no_seed else "")
    if getattr(dataset, "_deterministic", None) == "false":
        found = "parallel calls with `deterministic=False`"
        return Order(found, found)
    return Order()


def _order_in(graph: Any) -> Order:
    """Returns in how far a graph's datasets keep an order."""
    varies = differs = False
    for node in _nodes(graph):
        if node.op in _SHUFFLES:
            varies |= node.attr["reshuffle_each_iteration"].b
            # Behind the dataset and the size of the buffer.
            differs |= all(_value(graph, name) == 0 for name in node.input[2:4])
    return Order("a shuffle" if varies else "", "a shuffle" if differs else "")


def _value(graph: Any, name: str) -> Any:
    """Returns the value of a constant of a graph, None if it is none."""
    base = name.partition(":")[0]
    for node in _nodes(graph):
        if node.name == base and node.op == "Const":
            found = tf.make_ndarray(node.attr["value"].tensor)
            return found.item() if found.size == 1 else None
    return None


def begins_anew(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset that runs Python begins with the same element twice.

    A generator that was called already goes on instead, and what was read is lost.
    """
    both = [next(iter(dataset), None) for _ in range(2)]
    first, again = (tf.nest.flatten(one, expand_composites=True) for one in both)
    return len(first) == len(again) and all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(first, again, strict=True)
    )
