"""Plans that differ from another one in which layers are in float32."""

import dataclasses
from collections.abc import Iterable, Mapping

import keras

from tfamp.dtypes.planned_layers import PlannedLayer
from tfamp.keras_hooks.layer_record import Kind
from tfamp.plan import PrecisionPlan

_NOT_MOVED = (Kind.EXPLICIT.value, "unmanaged")


def with_float32(
    plan: PrecisionPlan, layers: Mapping[str, str], *, rule: str = "tune"
) -> PrecisionPlan:
    """Returns a plan with more layers in float32, what is inside them as well.

    They compute in float32 and give the policy's compute dtype, as a layer does that
    `keep_float32` names.

    Args:
        plan: A plan under a half-precision policy.
        layers: Path -> reason.
        rule: What decided.
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
            row = _kept(row, rule, layers[row.path], half)
        rows.append(row)
    return plan.replace(rows=tuple(rows))


def with_half(
    plan: PrecisionPlan, layers: Iterable[str], reasons: Mapping[str, str] | None = None
) -> PrecisionPlan:
    """Returns a plan with layers back in half precision, what follows them as well.

    Args:
        plan: A plan under a half-precision policy.
        layers: Paths of layers that it keeps in float32.
        reasons: Path -> why that does no harm.
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
                reason=(reasons or {}).get(row.path, ""),
                output_dtype=None,
                exact_inputs=False,
                inner_dtype=None,
                applies_to="all",
                compute_dtype=policy.compute_dtype,
                dtype_policy=policy.name,
            )
        rows.append(row)
    return plan.replace(rows=tuple(rows))


def _kept(row: PlannedLayer, rule: str, reason: str, half: str) -> PlannedLayer:
    return dataclasses.replace(
        row,
        kind=Kind.FLOAT32_INSIDE.value,
        rule=rule,
        reason=reason,
        output_dtype=half,
        exact_inputs=True,
        compute_dtype="float32",
        dtype_policy="float32",
    )


def _around(path: str, chosen: Iterable[str]) -> str | None:
    """Returns the chosen layer that a path lies in, None where it lies in none."""
    names = set(chosen)
    parts = path.split("/")
    outer = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return next((name for name in outer if name in names), None)
