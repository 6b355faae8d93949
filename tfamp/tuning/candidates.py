"""Which layers and operations a tuner may move between float32 and half precision."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.dtypes import graph_operations
from tfamp.dtypes.planned_layers import PlannedOperation
from tfamp.keras_hooks.layer_record import Kind
from tfamp.numerics.sensitivity.result import LayerSensitivity, Sensitivity
from tfamp.numerics.sensitivity.search import FORWARD_LIMIT
from tfamp.plan import PrecisionPlan
from tfamp.tuning import layer_choice
from tfamp.tuning.search import Suspect

# What decided of layers that may be given back without `relax_rules`.
_GIVEN_BACK = ("tune", "NanRecovery")


class Candidates:
    """The candidates of one model, and the plans that they make.

    Args:
        model: The model.
        base: The plan to start from: default rules, or what an earlier run came to.
        found: What half precision does to each layer alone.
        saved: The share of the whole that it saves on each.
        relax_rules: Whether what default rules keep may move, too.
        judges_gradients: Whether plans are judged by trainings. Where they are not,
            layers whose gradients suffer stay in float32.

    Attributes:
        suspects: The candidates.
    """

    def __init__(
        self,
        model: keras.Model,
        base: PrecisionPlan,
        found: Sensitivity,
        saved: Mapping[str, float],
        *,
        relax_rules: bool,
        training: bool,
        judges_gradients: bool,
    ) -> None:
        self._rows = {row.path: row for row in base.rows[1:]}
        self._operations = {
            path: (place, type(operation).__name__)
            for place, (path, operation) in enumerate(graph_operations.of_model(model))
        }
        self._relaxes, self._dtype = relax_rules, found.dtype
        self._reasons: dict[str, str] = {}
        self.suspects: list[Suspect] = []
        needed = []
        for layer in found.layers:
            if not self._may_move(layer.path):
                continue
            self._reasons[layer.path] = self._reason(layer)
            by_gradients = layer.is_guilty and self._is_sound_forward(layer)
            if by_gradients and training and not judges_gradients:
                needed.append(layer.path)
            elif not (by_gradients and not training):
                self.suspects.append(self._suspect(layer, saved, training=training))
        self._base = layer_choice.with_half(base, self._kept(), self._reasons)
        self._base = self.plan(needed)

    def plan(self, float32: Sequence[str]) -> PrecisionPlan:
        """Returns the plan with these candidates in float32, and no others."""
        layers = {path: self._reasons[path] for path in float32 if path in self._rows}
        chosen = layer_choice.with_float32(self._base, layers)
        half = keras.DTypePolicy(chosen.policy).compute_dtype
        operations = tuple(
            PlannedOperation(
                *(self._operations[path][0], path, self._operations[path][1]),
                half,
                "tune",
                self._reasons[path],
            )
            for path in float32
            if path not in self._rows
        )
        return chosen.replace(operations=(*chosen.operations, *operations))

    def _kept(self) -> set[str]:
        kept = {p for p, r in self._rows.items() if r.kind == Kind.FLOAT32_INSIDE.value}
        return kept & self._reasons.keys()

    def _may_move(self, path: str) -> bool:
        row = self._rows.get(path)
        if row is None:
            return path in self._operations
        if row.kind == Kind.FLOAT32_INSIDE.value:
            return self._relaxes or row.rule in _GIVEN_BACK
        return row.kind == Kind.FOLLOWS.value

    def _reason(self, layer: LayerSensitivity) -> str:
        row = self._rows.get(layer.path)
        if row is not None and row.kind == Kind.FLOAT32_INSIDE.value:
            return row.reason
        outputs = (
            f"error {layer.forward_error:.2g} of its outputs and "
            f"{layer.backward_error:.2g} of its gradients in half precision"
        )
        return layer.explanation or outputs

    def _is_sound_forward(self, layer: LayerSensitivity) -> bool:
        return layer.forward_error <= FORWARD_LIMIT[self._dtype]

    def _suspect(
        self, layer: LayerSensitivity, saved: Mapping[str, Any], *, training: bool
    ) -> Suspect:
        error = layer.forward_error
        if training:
            error = max(error, layer.backward_error)
        row = self._rows.get(layer.path)
        is_kept = row is not None and row.kind == Kind.FLOAT32_INSIDE.value
        return Suspect(
            layer.path,
            float(np.nan_to_num(error, nan=1e9, posinf=1e9)),
            saved.get(layer.path, 0.0),
            layer.is_guilty or is_kept,
        )
