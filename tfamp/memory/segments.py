"""Pieces of a graph that are computed again, cut where little passes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras


class Segment(NamedTuple):
    """Consecutive nodes of a graph.

    `inputs` are tensors that they take from before, `outputs` those needed behind them.
    """

    nodes: tuple[Any, ...]
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers that the nodes call, once each."""
        found = {
            id(node.operation): node.operation
            for node in self.nodes
            if isinstance(node.operation, keras.layers.Layer)
        }
        return list(found.values())


def cut(
    nodes: Sequence[Any], results: Sequence[Any], count: int | None = None
) -> list[Segment]:
    """Cuts a graph where little passes from one side to the other.

    Segments make about equally many bytes; a cut lies where the fewest bytes pass
    within half a segment of the place that would make them equal. `count` of them are
    wanted; None is the square root of the number of nodes, which needs the least memory
    where all are alike.
    """
    if count is None:
        count = max(1, round(math.sqrt(len(nodes))))
    crossing = _crossing(nodes, results)
    done, sums = 0, []
    for node in nodes:
        done += sum(map(_size, node.output_tensors))
        sums.append(done)
    places = set()
    for number in range(1, count):
        wanted = done * number / count

        def off(place: int, wanted: float = wanted) -> float:
            return abs(sums[place] - wanted)

        near = [p for p in range(len(nodes) - 1) if off(p) <= done / count / 2]
        if near:
            places.add(min(near, key=lambda p: (crossing[p], off(p))))
    edges = [0, *(place + 1 for place in sorted(places)), len(nodes)]
    return [
        _segment(nodes, start, end, results) for start, end in itertools.pairwise(edges)
    ]


def _crossing(nodes: Sequence[Any], results: Sequence[Any]) -> list[int]:
    """Returns the bytes that pass behind each node to nodes further on."""
    last = {id(x): len(nodes) for x in results}
    for place, node in reversed(list(enumerate(nodes))):
        for x in node.input_tensors:
            last.setdefault(id(x), place)
    alive: dict[int, int] = {}
    found = []
    for place, node in enumerate(nodes):
        for x in (*node.input_tensors, *node.output_tensors):
            alive[id(x)] = _size(x)
        alive = {key: size for key, size in alive.items() if last.get(key, -1) > place}
        found.append(sum(alive.values()))
    return found


def _segment(
    nodes: Sequence[Any], start: int, end: int, results: Sequence[Any]
) -> Segment:
    own = nodes[start:end]
    made = {id(x): x for node in own for x in node.output_tensors}
    taken = {id(x): x for node in own for x in node.input_tensors}
    wanted = {id(x) for node in nodes[end:] for x in node.input_tensors}
    wanted |= {id(x) for x in results}
    return Segment(
        tuple(own),
        tuple(x for key, x in taken.items() if key not in made),
        tuple(x for key, x in made.items() if key in wanted),
    )


def _size(tensor: keras.KerasTensor) -> int:
    """Returns the numbers of one example, which stand for the bytes of a batch."""
    return math.prod(size or 1 for size in tensor.shape)
