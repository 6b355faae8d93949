"""What `tfamp.tune` left in the plans that are compared."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfamp.dtypes import planned_layers
from tfamp.plan import PrecisionPlan
from tfamp.records.record import Record
from tfamp.trials.variant import Variant

# What a reader of the evidence goes by; a file of another version may have less.
_NEEDED = ("reason", "tolerance", "metric", "layers", "evaluations", "seconds")


@dataclasses.dataclass(frozen=True)
class TunedPlan(Record):
    """A plan that `tfamp.tune` made: what computes in float32, and how it was found.

    Args:
        policy: The policy of layers that nothing else decides.
        float32: Paths of the layers and operations that compute in float32.
        tuning: `PrecisionPlan.evidence["tuning"]`: the errors and savings of the
            layers, the evaluations of the search, what it cost.
    """

    policy: str
    float32: tuple[str, ...]
    tuning: dict[str, Any] = dataclasses.field(hash=False)


def tuned_plans(policies: Sequence[str]) -> dict[str, TunedPlan]:
    """Returns those of some policies that are files of plans by `tfamp.tune`.

    Args:
        policies: Words as `Variant.parse` reads them.

    Raises:
        ValueError: A file holds no plan that can be read.
    """
    found = {}
    for policy in policies:
        variant = Variant.parse(policy)
        if not variant.is_plan:
            continue
        plan = PrecisionPlan.from_json(variant.policy)
        tuning = plan.evidence.get("tuning")
        if isinstance(tuning, dict) and all(name in tuning for name in _NEEDED):
            float32 = planned_layers.in_float32(plan.rows, plan.operations)
            found[policy] = TunedPlan(plan.policy, float32, tuning)
    return found
