"""Plans that `tfamp.tune` made: how they were found, as sentences and rows."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence, TunedPlan
from tfamp.records.units import format_seconds, join_words

# Letters of a path that a row shows.
_MOST_LETTERS = 24
# Layers in float32 that a line names.
_MOST_NAMED = 4
LAYER_COLUMNS = ("computes in", "error of outputs", "of gradients", "saves")
EVALUATION_COLUMNS = ("in float32", "worse by", "at most", "tolerance", "took")


Rows = tuple[tuple[str, ...], ...]


class _Try(NamedTuple):
    """An evaluation of a search."""

    number: int  # from 1
    # Paths of the layers in float32 beyond those that rules keep.
    float32: tuple[str, ...]
    worsening: float  # the mean; infinite where the plan could not run
    bound: float  # what the true worsening is below
    holds: bool  # whether that is within the tolerance
    is_fresh: bool  # whether it was made on examples that the choice had not seen
    seconds: float  # what it took

    @property
    def num_float32(self) -> int:
        """How many layers are in float32 beyond those that rules keep."""
        return len(self.float32)


@dataclasses.dataclass(frozen=True)
class PlanSection:
    """What is told of one plan.

    `found` says what it came to, `cost` what the answer cost; `layers` has a row for
    each, its name and figures by `LAYER_COLUMNS`, those in float32 and those with the
    largest errors first; `evaluations` one by `EVALUATION_COLUMNS`, in order.
    """

    key: str
    label: str
    found: str
    cost: str
    layers: Rows
    evaluations: Rows
    plan: TunedPlan


def plan_sections(evidence: Evidence) -> tuple[PlanSection, ...]:
    """Returns a section for each compared plan that `tfamp.tune` made."""
    return tuple(
        PlanSection(
            f"plan-{number}",
            evidence.label(policy),
            _found(plan),
            _cost(plan.tuning),
            _layers(plan),
            _evaluations(plan.tuning),
            plan,
        )
        for number, (policy, plan) in enumerate(evidence.plans.items(), 1)
    )


def _found(plan: TunedPlan) -> str:
    tuning = plan.tuning
    number = sum(layer["path"] in set(plan.float32) for layer in tuning["layers"])
    return (
        f"{number} of {len(tuning['layers'])} layers compute in float32, under the "
        f"policy {plan.policy}: {tuning['reason']}. Judged by {tuning['metric']}, "
        f"which may be worse by {float(tuning['tolerance']):g}."
    )


def _cost(tuning: dict[str, Any]) -> str:
    number = len(tuning["evaluations"])
    fresh = " and one on fresh examples" if tuning.get("confirmed") else ""
    spent = sum(each.seconds for each in _tries(tuning))
    return (
        f"The answer cost {format_seconds(float(tuning['seconds']))}: {number} "
        f"{'evaluation' if number == 1 else 'evaluations'}{fresh}, which took "
        f"{format_seconds(spent)}, and the pass that ranked the layers."
    )


def _layers(plan: TunedPlan) -> Rows:
    float32 = set(plan.float32)

    def order(layer: dict[str, Any]) -> tuple[bool, float]:
        return layer["path"] not in float32, -_error_of(layer)

    return tuple(
        (
            layer["path"],
            "float32" if layer["path"] in float32 else "half precision",
            _number(layer["forward_error"]),
            _number(layer["backward_error"]),
            f"{100 * float(layer['saving']):.1f} %",
        )
        for layer in sorted(plan.tuning["layers"], key=order)
    )


def _evaluations(tuning: dict[str, Any]) -> Rows:
    found = []
    for one in _tries(tuning):
        rest = one.num_float32 - _MOST_NAMED
        shown = [*map(short_path, one.float32[:_MOST_NAMED])]
        if rest > 0:
            shown.append(f"{rest} more")
        row = (
            "fresh examples" if one.is_fresh else str(one.number),
            join_words(shown) if shown else "none beyond the rules'",
            _number(one.worsening) if math.isfinite(one.worsening) else "cannot run",
            _number(one.bound) if math.isfinite(one.bound) else figures.MISSING,
            "holds" if one.holds else "does not hold",
            format_seconds(one.seconds),
        )
        found.append(row)
    return tuple(found)


def _number(value: Any) -> str:
    number = float(value)
    if math.isnan(number):
        return figures.MISSING
    text = f"{number:.2g}" if math.isfinite(number) else "overflow"
    return text.replace("-", "−")


def _error_of(layer: Mapping[str, Any]) -> float:
    """Returns the larger error of a layer, of its outputs or of its gradients."""
    errors = [float(layer[name]) for name in ("forward_error", "backward_error")]
    return max((e for e in errors if not math.isnan(e)), default=0.0)


def short_path(path: str) -> str:
    """Returns a path, or its end where it is long.

    Example:
        >>> short_path("encoder/block_11/attention/query")
        '…lock_11/attention/query'
    """
    return path if len(path) <= _MOST_LETTERS else f"…{path[1 - _MOST_LETTERS :]}"


def _tries(tuning: Mapping[str, Any]) -> list[_Try]:
    """Returns the evaluations of a search in order, that on fresh examples last."""
    fresh = [tuning["confirmed"]] if tuning.get("confirmed") else []
    return [
        _Try(
            number,
            tuple(each["float32"]),
            float(each["worsening"]),
            float(each["bound"]),
            bool(each["holds"]),
            number > len(tuning["evaluations"]),
            float(each.get("seconds", 0.0)),
        )
        for number, each in enumerate([*tuning["evaluations"], *fresh], 1)
    ]
