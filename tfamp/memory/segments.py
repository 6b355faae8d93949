"""Pieces of a graph, what they save, and which to compute again to fit a target."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
from absl import logging

from tfamp.graph import read_operations
from tfamp.graph.bodies import is_backward
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.memory.estimator import StepMemory
from tfamp.records.units import format_bytes, format_share
from tfamp.stepping.step_traces import Roofline, computing

# A piece saves less than it keeps, since its own gradient needs it once.
_MAX_ROUNDS = 6


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


@dataclasses.dataclass(frozen=True)
class Savings:
    """A step's peak, and what makes it up by path of a layer.

    `kept` are the bytes that its forward pass made and the peak holds, `cost` is the
    time of that pass, in that of moving a byte.
    """

    peak_bytes: int
    kept: dict[str, int]
    cost: dict[str, float]

    def of(
        self, model: keras.Model, layers: Iterable[keras.layers.Layer]
    ) -> tuple[int, float]:
        """Returns the bytes and the time of some layers with all inside them."""
        inside = {id(each) for layer in layers for _, each, _ in structure.walk(layer)}
        rows = structure.walk(model)
        paths = [path for path, layer, _ in rows if id(layer) in inside]
        kept = sum(self.kept.get(path, 0) for path in paths)
        return kept, sum(self.cost.get(path, 0.0) for path in paths)


def peak_bytes(model: keras.Model, batch_size: int, data: Any) -> int:
    """Returns the most that a training step holds, from its traced graph."""
    with model.distribute_strategy.scope():
        return StepMemory(model, data).peak_of_graph(batch_size)[0]


def read_savings(model: keras.Model, batch_size: int, data: Any) -> Savings:
    """Traces a training step and returns what each layer keeps and costs."""
    with model.distribute_strategy.scope():
        whole, traced, peak = StepMemory(model, data).peak_of_graph(batch_size)
    kept: collections.Counter[str] = collections.Counter()
    for held in peak.held:
        layer = traced.marks.layer_of(held.name)
        if layer and not is_backward(held.name):
            kept[layer] += held.num_bytes
    roofline = Roofline(computing(devices.devices()))
    cost: dict[str, float] = collections.defaultdict(float)
    for operation in read_operations(traced.concrete):
        layer = traced.marks.layer_of(operation.name)
        if layer and not operation.is_backward:
            cost[layer] += roofline.cost(operation) * operation.count
    return Savings(whole, dict(kept), dict(cost))


def fit_into(
    model: keras.Model,
    pieces: Sequence[Sequence[keras.layers.Layer]],
    put: Callable[[set[int]], None],
    *,
    max_memory_bytes: int,
    batch_size: int,
    data: Any = None,
) -> None:
    """Has the pieces computed again that save most for the time they take.

    `put` has pieces, by number, computed again, and no others.

    Raises:
        ValueError: The step does not fit with all of them either; nothing is changed.
    """
    savings = read_savings(model, batch_size, data)
    saved = [savings.of(model, piece) for piece in pieces]
    order = ranked(saved)
    peak, count = savings.peak_bytes, 0
    for number in range(_MAX_ROUNDS + 1):
        if peak <= max_memory_bytes or count == len(order):
            break
        # The last round takes all.
        missing = peak - max_memory_bytes if number < _MAX_ROUNDS else math.inf
        while count < len(order) and missing > 0:
            missing -= saved[order[count]][0]
            count += 1
        put(set(order[:count]))
        peak = peak_bytes(model, batch_size, data)
    before = format_bytes(savings.peak_bytes)
    if peak > max_memory_bytes:
        put(set())
        raise ValueError(
            f"`max_memory_bytes` is {format_bytes(max_memory_bytes)}, and a batch of "
            f"{batch_size:,} takes {format_bytes(peak)} with all {len(order)} pieces "
            f"computed again ({before} without); expected a target that can be met. "
            "Take a smaller batch, which `tfamp.find_batch_size` finds, or more pieces "
            "by `segments`."
        )
    cost = sum(saved[number][1] for number in order[:count])
    logging.info(
        "tfamp.remat: %d of %d pieces of %r are computed again in the backward pass: "
        "%s instead of %s (predicted), for %s of a forward pass.",
        count,
        len(pieces),
        model.name,
        format_bytes(peak),
        before,
        format_share(cost / (sum(savings.cost.values()) or 1.0)),
    )


def ranked(saved: Sequence[tuple[int, float]]) -> list[int]:
    """Returns the numbers of pieces that keep anything, most bytes for the time first.

    `saved` are bytes and time of each.
    """

    def worth(number: int) -> float:
        kept, cost = saved[number]
        return kept / cost if cost else 0.0

    saving = [number for number, (kept, _) in enumerate(saved) if kept > 0]
    return sorted(saving, key=worth, reverse=True)
