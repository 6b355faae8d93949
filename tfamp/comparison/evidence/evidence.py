"""All that a comparison found: runs, verdicts, where it was measured."""

import dataclasses
import math
from typing import Literal

from tfamp.comparison.evidence import measures
from tfamp.comparison.evidence.verdict import Answer, Verdict
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.trials.intervals import Interval, interval_of_ratios
from tfamp.trials.run_records import Context, OperationTime, Run


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
        tolerance: The loss of the metric that counts as none: absolute where larger
            is better, else as a part of the reference's mean.
        on_validation: Whether the metric was taken on validation data.
        runs: One for each policy and seed, those that failed too.
        verdicts: Policy -> verdict, for all but the reference.
        context: Where it was measured; None if no run got so far.
        notes: What a reader should know, one sentence each.
        operations: Policy -> operations by time, where a profile was taken.
        num_looks: How often runs of this comparison were judged, this time included.
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
    operations: dict[str, tuple[OperationTime, ...]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    num_looks: int = 1

    @property
    def candidates(self) -> tuple[str, ...]:
        """The policies that have a verdict."""
        return tuple(p for p in self.policies if p != self.reference)

    @property
    def best(self) -> str:
        """The policy with the best verdict, of two alike the faster one."""
        order: tuple[Answer, ...] = (
            "worse",
            "undecided",
            "equivalent, not faster",
            "equivalent and faster",
        )

        def rank(policy: str) -> tuple[int, float]:
            verdict = self.verdicts[policy]
            speed = verdict.speed.estimate
            return order.index(verdict.answer), speed if math.isfinite(speed) else 0.0

        return max(self.candidates, key=rank)

    @property
    def verdict(self) -> Answer:
        """The answer for the best policy; `verdicts` has each, with its reason."""
        return self.verdicts[self.best].answer

    def finished(self, policy: str) -> tuple[Run, ...]:
        """Returns the finished runs of a policy, by seed."""
        runs = [run for run in self.runs if run.policy == policy and run.is_finished]
        return tuple(sorted(runs, key=lambda run: run.seed))

    def pairs(
        self, policy: str, reference: str | None = None
    ) -> tuple[tuple[Run, Run], ...]:
        """Returns the finished runs of the reference and a policy with equal seeds.

        Args:
            policy: One of `policies`.
            reference: Another one to hold it against than `reference`.
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
        found = measures.find(measure, self.runs)
        return interval_of_ratios(self.ratios(found, policy, reference))

    def ratios(
        self, measure: measures.Measure, policy: str, reference: str | None = None
    ) -> list[float]:
        """Returns that ratio for each pair of runs that has both values."""
        ratios = []
        for before, after in self.pairs(policy, reference):
            first, second = measure.of(before), measure.of(after)
            if first and second:
                ratios.append(second / first)
        return ratios
