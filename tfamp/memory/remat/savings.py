"""What each layer keeps for the gradient, and what it costs to compute it again."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import keras

from tfamp.graph.bodies import is_backward
from tfamp.graph.operations import read_operations
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.memory.estimate.model_steps import Asked
from tfamp.stepping.costs import Roofline, computing


@dataclasses.dataclass(frozen=True)
class Savings:
    """A step's memory and what makes it up.

    Args:
        peak_bytes: All that is held when most is.
        kept: Bytes that a layer's forward pass made and the peak holds, by path.
        cost: Time of a layer's forward pass, by path, in that of moving a byte.
    """

    peak_bytes: int
    kept: dict[str, int]
    cost: dict[str, float]

    def of(
        self, model: keras.Model, layers: Iterable[keras.layers.Layer]
    ) -> tuple[int, float]:
        """Returns the bytes and the time of some layers with all inside them."""
        inside = {id(each) for layer in layers for _, each, _ in structure.walk(layer)}
        paths = [
            path for path, layer, _ in structure.walk(model) if id(layer) in inside
        ]
        return (
            sum(self.kept.get(path, 0) for path in paths),
            sum(self.cost.get(path, 0.0) for path in paths),
        )


def peak_bytes(model: keras.Model, batch_size: int, data: Any) -> int:
    """Returns the most that a training step holds, from its traced graph."""
    with model.distribute_strategy.scope():
        return Asked(model, data, training=True, in_xla=False).whole(batch_size)[0]


def read_savings(model: keras.Model, batch_size: int, data: Any) -> Savings:
    """Traces a training step and returns what each layer keeps and costs.

    Args:
        model: A compiled model.
        batch_size: Examples of a step, of all replicas.
        data: As for `estimate_memory`.
    """
    with model.distribute_strategy.scope():
        asked = Asked(model, data, training=True, in_xla=False)
        whole, traced, peak = asked.whole(batch_size)
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
