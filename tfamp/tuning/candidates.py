"""Which layers and operations a tuner may move between float32 and half precision."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.dtypes.rows import PlannedOperation
from tfamp.graph import read_operations
from tfamp.graph.products import flops_of, is_product
from tfamp.keras_hooks import exact_values, structure
from tfamp.keras_hooks.layers import Kind
from tfamp.machine import devices
from tfamp.numerics.sensitivity import FORWARD_LIMIT, LayerSensitivity, Sensitivity
from tfamp.plan import PrecisionPlan
from tfamp.stepping.step_traces import cost, flops_per_byte, num_bytes, trace_step
from tfamp.tuning.search import Suspect

_NOT_MOVED = (Kind.EXPLICIT.value, "unmanaged")


class Candidates:
    """The `suspects` of one model that may move, and plans made of them.

    `base` is the plan of the default rules; `found` says what half precision does to
    each layer alone, `saved` what share of the whole it saves. Layers whose gradients
    suffer stay in float32: outputs of trained weights do not show them.
    """

    def __init__(
        self,
        model: keras.Model,
        base: PrecisionPlan,
        found: Sensitivity,
        saved: Mapping[str, float],
    ) -> None:
        kinds = {row.path: row.kind for row in base.rows[1:]}
        self._operations = {
            path: (place, type(operation).__name__)
            for place, (path, operation) in enumerate(exact_values.operations_in(model))
            if path not in kinds
        }
        self._reasons: dict[str, str] = {}
        self._base = base
        self.suspects: list[Suspect] = []
        needed = []
        for layer in found.layers:
            path = layer.path
            if kinds.get(path) != Kind.FOLLOWS.value and path not in self._operations:
                continue
            self._reasons[path] = _reason(layer)
            if layer.is_guilty and layer.forward_error <= FORWARD_LIMIT[found.dtype]:
                needed.append(path)
                continue
            error = max(layer.forward_error, layer.backward_error)
            error = float(np.nan_to_num(error, nan=1e9, posinf=1e9))
            suspect = Suspect(path, error, saved.get(path, 0.0), layer.is_guilty)
            self.suspects.append(suspect)
        self._base = self.plan(needed)

    def plan(self, float32: Sequence[str]) -> PrecisionPlan:
        """Returns the plan with these candidates in float32, and no others."""
        plan, half = self._base, keras.DTypePolicy(self._base.policy).compute_dtype
        layers = {path for path in float32 if path not in self._operations}
        exact: dict[str, Any] = {"compute_dtype": "float32", "dtype_policy": "float32"}
        rows = []
        for row in plan.rows:
            parts = row.path.split("/")
            around = ("/".join(parts[:end]) for end in range(1, len(parts)))
            outer = next((name for name in around if name in layers), None)
            changed: dict[str, Any] = {}
            # Ahead of its own turn: it would hand on half precision in its layer.
            if outer is not None and row.kind not in _NOT_MOVED:
                changed = {
                    **{"kind": Kind.SUBLAYER.value, "rule": f"inside {outer!r}"},
                    "reason": f"the layer around it, {outer!r}, is kept in float32",
                    "output_dtype": None,
                }
            elif row.path in layers and row.kind == Kind.FOLLOWS.value:
                changed = {
                    **{"kind": Kind.FLOAT32_INSIDE.value, "rule": "tune"},
                    "reason": self._reasons[row.path],
                    **{"output_dtype": half, "exact_inputs": True},
                }
            rows.append(
                dataclasses.replace(row, **exact, **changed) if changed else row
            )
        operations = list(plan.operations)
        for path in float32:
            if path in self._operations:
                how = half, "tune", self._reasons[path]
                place, name = self._operations[path]
                operations.append(PlannedOperation(place, path, name, *how))
        return plan.replace(rows=tuple(rows), operations=tuple(operations))


def _reason(layer: LayerSensitivity) -> str:
    return layer.explanation or (
        f"error {layer.forward_error:.2g} of its outputs and "
        f"{layer.backward_error:.2g} of its gradients in half precision"
    )


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
