"""Which layers and operations a tuner may move between float32 and half precision."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.dtypes import model_dtypes
from tfamp.dtypes.planned_layers import PlannedOperation
from tfamp.graph import read_operations
from tfamp.graph.products import flops_of, is_product
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import Kind
from tfamp.machine import devices
from tfamp.numerics.sensitivity import FORWARD_LIMIT
from tfamp.numerics.sensitivity.errors import LayerSensitivity, Sensitivity
from tfamp.plan import PrecisionPlan
from tfamp.stepping.step_traces import Roofline, computing, num_bytes, trace_step
from tfamp.tuning.search import Suspect

# What decided of layers that may be given back without `relax_rules`.
_GIVEN_BACK = ("tune", "NanRecovery")
_NOT_MOVED = (Kind.EXPLICIT.value, "unmanaged")


class Candidates:
    """The layers and operations of one model that may move, and plans made of them.

    Args:
        model: The model.
        base: The plan to start from: default rules, or what an earlier run came to.
        found: What half precision does to each layer alone.
        saved: The share of the whole that it saves on each.
        relax_rules: Whether what default rules keep may move, too.
        training: Whether the plan is to train; else gradients do not count.
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
        rows = {row.path: row for row in base.rows[1:]}
        self._operations = {
            path: (place, type(operation).__name__)
            for place, (path, operation) in enumerate(model_dtypes.of_model(model))
            if path not in rows
        }
        self._reasons: dict[str, str] = {}
        self.suspects: list[Suspect] = []
        needed, kept = [], set()
        for layer in found.layers:
            path, row = layer.path, rows.get(layer.path)
            if row is None:
                is_kept, may_move = False, path in self._operations
            else:
                is_kept = row.kind == Kind.FLOAT32_INSIDE.value
                is_given_back = relax_rules or row.rule in _GIVEN_BACK
                may_move = is_given_back if is_kept else row.kind == Kind.FOLLOWS.value
            if not may_move:
                continue
            self._reasons[path] = _reason(layer)
            if row is not None and is_kept:
                self._reasons[path] = row.reason
                kept.add(path)
            is_sound_forward = layer.forward_error <= FORWARD_LIMIT[found.dtype]
            is_guilty_by_gradients = layer.is_guilty and is_sound_forward
            if is_guilty_by_gradients and not (training and judges_gradients):
                if training:
                    needed.append(path)
                continue
            errors = (layer.forward_error, layer.backward_error if training else 0.0)
            self.suspects.append(
                Suspect(
                    path,
                    float(np.nan_to_num(max(errors), nan=1e9, posinf=1e9)),
                    saved.get(path, 0.0),
                    layer.is_guilty or is_kept,
                )
            )
        self._base = with_half(base, kept, self._reasons)
        self._base = self.plan(needed)

    def plan(self, float32: Sequence[str]) -> PrecisionPlan:
        """Returns the plan with these candidates in float32, and no others."""
        layers = {p: self._reasons[p] for p in float32 if p not in self._operations}
        chosen = with_float32(self._base, layers)
        half = keras.DTypePolicy(chosen.policy).compute_dtype
        operations = []
        for path in float32:
            if path in self._operations:
                place, name = self._operations[path]
                reason = self._reasons[path]
                operations.append(
                    PlannedOperation(place, path, name, half, "tune", reason)
                )
        return chosen.replace(operations=(*chosen.operations, *operations))


def _reason(layer: LayerSensitivity) -> str:
    return layer.explanation or (
        f"error {layer.forward_error:.2g} of its outputs and "
        f"{layer.backward_error:.2g} of its gradients in half precision"
    )


def with_float32(
    plan: PrecisionPlan, layers: Mapping[str, str], *, rule: str = "tune"
) -> PrecisionPlan:
    """Returns a plan with more layers in float32, what is inside them as well.

    They compute in float32 and give the policy's compute dtype, as a layer does that
    `keep_float32` names. `layers` has path -> reason, `rule` is what decided.
    """
    half = keras.DTypePolicy(plan.policy).compute_dtype
    rows = []
    for row in plan.rows:
        outer = _around(row.path, layers)
        # Ahead of its own turn: it would hand on half precision in its float32 layer.
        if outer is not None and row.kind not in _NOT_MOVED:
            row = dataclasses.replace(
                row,
                kind=Kind.SUBLAYER.value,
                rule=f"inside {outer!r}",
                reason=f"the layer around it, {outer!r}, is kept in float32",
                output_dtype=None,
                compute_dtype="float32",
                dtype_policy="float32",
            )
        elif row.path in layers and row.kind == Kind.FOLLOWS.value:
            row = dataclasses.replace(
                row,
                kind=Kind.FLOAT32_INSIDE.value,
                rule=rule,
                reason=layers[row.path],
                output_dtype=half,
                exact_inputs=True,
                compute_dtype="float32",
                dtype_policy="float32",
            )
        rows.append(row)
    return plan.replace(rows=tuple(rows))


def with_half(
    plan: PrecisionPlan, layers: Iterable[str], reasons: Mapping[str, str]
) -> PrecisionPlan:
    """Returns a plan with layers back in half precision, what follows them as well.

    `reasons` says by path why that does no harm.
    """
    chosen, policy = set(layers), keras.DTypePolicy(plan.policy)
    rows = []
    for row in plan.rows:
        follows = row.kind == Kind.SUBLAYER.value and _around(row.path, chosen)
        if row.path in chosen or follows:
            row = dataclasses.replace(
                row,
                kind=Kind.FOLLOWS.value,
                rule="tune" if row.path in chosen else f"policy {plan.policy}",
                reason=reasons.get(row.path, ""),
                output_dtype=None,
                exact_inputs=False,
                inner_dtype=None,
                applies_to="all",
                compute_dtype=policy.compute_dtype,
                dtype_policy=policy.name,
            )
        rows.append(row)
    return plan.replace(rows=tuple(rows))


def _around(path: str, chosen: Iterable[str]) -> str | None:
    """Returns the chosen layer that a path lies in, None where it lies in none."""
    names = set(chosen)
    parts = path.split("/")
    outer = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return next((name for name in outer if name in names), None)


def savings_of(
    model: keras.Model,
    dataset: Any,
    dtype: str,
    *,
    training: bool = True,
) -> dict[str, float]:
    """Returns path -> the share of the whole that half precision saves on a layer.

    The model computes in float32. The times are those of a roofline, whose shares order
    layers and foretell no speed. Without `training` it is a prediction's.
    """
    trace = trace_step(model, dataset, training=training)
    roofline = Roofline(computing(devices.devices()))
    ratio = roofline.flops_per_byte(dtype)
    total = 0.0
    saved = {path: 0.0 for path, _, _ in structure.walk(model)}
    for operation in read_operations(trace.concrete):
        path = trace.marks.layer_of(operation.name)
        low, exact = num_bytes(operation) / 2, roofline.cost(operation, "float32")
        if is_product(operation):
            low = max(low, (flops_of(operation) or 0) / ratio)
        total += exact * operation.count
        if path in saved:
            saved[path] += max(exact - low, 0.0) * operation.count
    return {path: value / max(total, 1.0) for path, value in saved.items()}
