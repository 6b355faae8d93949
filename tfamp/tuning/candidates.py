"""Which layers and operations a tuner may move between float32 and half precision."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.dtypes.rows import PlannedOperation
from tfamp.dtypes.settings import make_settings
from tfamp.graph import read_operations
from tfamp.graph.products import flops_of, is_product
from tfamp.keras_hooks import exact_values, structure
from tfamp.keras_hooks.layers import Kind
from tfamp.machine import devices
from tfamp.models import put_under
from tfamp.numerics.sensitivity import FORWARD_LIMIT, Sensitivity
from tfamp.plan import PrecisionPlan
from tfamp.stepping.step_traces import cost, flops_per_byte, num_bytes, trace_step
from tfamp.tuning.measured_policies import put_back
from tfamp.tuning.search import Suspect


class Candidates:
    """The `suspects` of one model that may move, and plans made of them.

    `found` says what half precision does to each layer alone, `saved` what share of the
    whole it saves. Layers whose gradients suffer stay in float32: outputs of trained
    weights do not show them.
    """

    def __init__(
        self,
        model: keras.Model,
        policy: str,
        found: Sensitivity,
        saved: Mapping[str, float],
    ) -> None:
        self._model, self._policy = model, policy
        self._layers = {path: layer for path, layer, _ in structure.walk(model)}
        self._operations = {
            path: (place, type(operation).__name__)
            for place, (path, operation) in enumerate(exact_values.operations_in(model))
            if path not in self._layers
        }
        self._reasons: dict[str, str] = {}
        self._needed: list[str] = []
        self.suspects: list[Suspect] = []
        rows = self.plan(()).rows[1:]
        movable = {row.path for row in rows if row.kind == Kind.FOLLOWS.value}
        for layer in found.layers:
            path = layer.path
            if path not in movable and path not in self._operations:
                continue
            self._reasons[path] = layer.explanation or (
                f"error {layer.forward_error:.2g} of its outputs and "
                f"{layer.backward_error:.2g} of its gradients in half precision"
            )
            if layer.is_guilty and layer.forward_error <= FORWARD_LIMIT[found.dtype]:
                self._needed.append(path)
                continue
            error = max(layer.forward_error, layer.backward_error)
            error = float(np.nan_to_num(error, nan=1e9, posinf=1e9))
            suspect = Suspect(path, error, saved.get(path, 0.0), layer.is_guilty)
            self.suspects.append(suspect)

    def plan(self, float32: Sequence[str]) -> PrecisionPlan:
        """Returns the plan of the rules with these candidates in float32 besides."""
        kept = [*self._needed, *float32]
        layers = [self._layers[path] for path in kept if path in self._layers]
        with put_back(self._model):
            put_under(self._model, make_settings(self._policy, layers or "default"))
            plan = PrecisionPlan.from_model(self._model)
        rows = [
            dataclasses.replace(row, rule="tune", reason=self._reasons[row.path])
            if row.path in kept
            else row
            for row in plan.rows
        ]
        half, operations = keras.DTypePolicy(self._policy).compute_dtype, []
        for path in kept:
            if path in self._operations:
                place, name = self._operations[path]
                how = half, "tune", self._reasons[path]
                operations.append(PlannedOperation(place, path, name, *how))
        operations = [*plan.operations, *operations]
        return plan.replace(rows=tuple(rows), operations=tuple(operations))


def savings_of(model: keras.Model, dataset: Any, dtype: str) -> dict[str, float]:
    """Returns path -> the share of a step that half precision saves on a layer."""
    trace = trace_step(model, dataset, training=True)
    here = devices.devices()
    ratio, wide = flops_per_byte(here, dtype), flops_per_byte(here, "float32")
    total = 0.0
    saved = {path: 0.0 for path, _, _ in structure.walk(model)}
    for operation in read_operations(trace.concrete):
        path = trace.marks.layer_of(operation.name)
        low, exact = num_bytes(operation) / 2, cost(operation, wide)
        if is_product(operation):
            low = max(low, (flops_of(operation) or 0) / ratio)
        total += exact * operation.count
        if path in saved:
            saved[path] += max(exact - low, 0.0) * operation.count
    return {path: value / max(total, 1.0) for path, value in saved.items()}
