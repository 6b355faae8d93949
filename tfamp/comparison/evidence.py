"""What a comparison measured, and what each measure comes to."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from tfamp.comparison import figures
from tfamp.comparison.figures import measures_of
from tfamp.comparison.judgement import are_same
from tfamp.comparison.verdict import Answer, Verdict
from tfamp.dtypes import planned_layers
from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.trials.run_records import Context, Run
from tfamp.trials.statistics import (
    Effect,
    Interval,
    effect_of_ratio,
    interval_of_ratios,
)
from tfamp.trials.variant import Variant, short_names

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


@dataclasses.dataclass(frozen=True)
class Evidence(Record):
    """What a comparison measured and what it comes to.

    Args:
        title: What was trained.
        policies: What was compared, in the order it was asked for.
        seeds: One run for each of them under each policy.
        reference: The policy that the others are held against.
        metric: Name of the metric that quality is judged by, as in `final_metrics`.
        better: Whether a larger ("max") or a smaller ("min") metric is better.
        tolerance: The loss of the metric that counts as none, in its own unit.
        on_validation: Whether the metric was taken on validation data.
        runs: One for each policy and seed, those that failed too.
        verdicts: Policy -> verdict, for all but the reference.
        context: Where it was measured; None if no run got so far.
        notes: What a reader should know, one sentence each.
        plans: Policy -> what `tfamp.tune` left in it, of those that are its plans.
    """

    title: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    metric: str
    better: Literal["max", "min"]
    tolerance: float
    on_validation: bool
    runs: tuple[Run, ...]
    verdicts: dict[str, Verdict] = dataclasses.field(hash=False)
    context: Context | None = None
    notes: tuple[str, ...] = ()
    plans: dict[str, TunedPlan] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The policies that have a verdict."""
        return tuple(p for p in self.policies if p != self.reference)

    @property
    def best(self) -> str:
        """The policy with the best verdict, of two alike the faster one."""

        def rank(policy: str) -> tuple[int, float]:
            verdict = self.verdicts[policy]
            place = get_args(Answer).index(verdict.answer)
            speed = verdict.speed.estimate
            return place, speed if math.isfinite(speed) else 0.0

        return max(self.candidates, key=rank)

    @property
    def verdict(self) -> Answer:
        """The answer for the best policy; `verdicts` has each, with its reason."""
        return self.verdicts[self.best].answer

    def label(self, policy: str) -> str:
        """Returns what a policy is called: that of a plan is the name of its file."""
        return short_names(self.policies).get(policy, policy)

    def finished(self, policy: str) -> tuple[Run, ...]:
        """Returns the finished runs of a policy, by seed."""
        runs = [run for run in self.runs if run.policy == policy and run.is_finished]
        return tuple(sorted(runs, key=lambda run: run.seed))

    def pairs(
        self, policy: str, reference: str | None = None
    ) -> tuple[tuple[Run, Run], ...]:
        """Returns the finished runs of the reference and a policy with equal seeds.

        `reference` is another of the policies to hold it against.
        """
        checks.choice("policy", policy, self.policies)
        reference = reference or self.reference
        checks.choice("reference", reference, self.policies)
        before = {run.seed: run for run in self.finished(reference)}
        return tuple(
            (before[run.seed], run)
            for run in self.finished(policy)
            if run.seed in before
        )

    def ratio(
        self, measure: str, policy: str, reference: str | None = None
    ) -> Interval:
        """Returns a policy's measure over the reference's, paired by seed.

        Args:
            measure: Such as "examples_per_second", "training_bytes",
                "latency_p50_batch_1"; an unknown one names them all.
            policy: One of `policies`.
            reference: Another one to divide by than `reference`.

        Returns:
            The geometric mean over seeds and its interval, whose ends are infinite
            or 0 for one seed; all NaN where no pair of runs has the measure.

        Raises:
            ValueError: The measure or the policy is unknown.
        """
        found = figures.find(measure, self.runs)
        return interval_of_ratios(self.ratios(found, policy, reference))

    def ratios(
        self, measure: figures.Measure, policy: str, reference: str | None = None
    ) -> list[float]:
        """Returns that ratio for each pair of runs that has both values."""
        pairs = self.pairs(policy, reference)
        values = ((measure.of(before), measure.of(after)) for before, after in pairs)
        return [second / first for first, second in values if first and second]


def tuned_plans(policies: Sequence[str]) -> dict[str, TunedPlan]:
    """Returns those of some policies that are files of plans by `tfamp.tune`."""
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


def effects_of(evidence: Evidence) -> dict[tuple[str, str], Effect]:
    """Returns what each measure comes to, by policy and name of the measure.

    Measures that another one answers for have none. Where a policy came to the
    reference itself, everything is the same.
    """
    found: dict[tuple[str, str], Effect] = {}
    for policy in evidence.candidates:
        pairs = evidence.pairs(policy)
        is_same = bool(pairs) and all(are_same(*pair) for pair in pairs)
        for measure in measures_of(evidence.runs):
            ratios = evidence.ratios(measure, policy)
            if measure.answered_by or not ratios:
                continue
            more = measure.more_is_better
            own = effect_of_ratio(interval_of_ratios(ratios), more_is_better=more)
            found[policy, measure.name] = "same" if is_same else own
    return found
