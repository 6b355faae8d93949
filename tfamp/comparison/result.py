"""From the runs of a comparison to what it comes to."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, get_args

import numpy as np

from tfamp.comparison import judgement, page, table
from tfamp.comparison.judgement import Better
from tfamp.comparison.verdict import Answer, Verdict
from tfamp.records import checks
from tfamp.records.record import TableRecord
from tfamp.trials.run_records import Context, Run
from tfamp.trials.statistics import Interval, interval_of_ratios
from tfamp.trials.variant import short_names

PerExample = Callable[[Sequence[tuple[Run, Run]], str], np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Comparison(TableRecord):
    """What a comparison measured and what it comes to; `print` shows it as a table.

    `.verdict` is the answer for the best policy, `.verdicts` has each with its reason,
    `.runs` every figure. Fields that are None were not measured; names end in units.
    """

    SCHEMA: ClassVar[int] = 2

    title: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    reference: str
    metric: str
    better: Better
    tolerance: float
    on_validation: bool
    runs: tuple[Run, ...]
    verdicts: dict[str, Verdict] = dataclasses.field(hash=False)
    context: Context | None = None
    notes: tuple[str, ...] = ()

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
            return place, float(np.nan_to_num(verdict.speed.estimate))

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
        """Returns finished runs of the reference and a policy with equal seeds."""
        checks.choice("policy", policy, self.policies)
        other = checks.choice("reference", reference or self.reference, self.policies)
        before = {run.seed: run for run in self.finished(other)}
        own = self.finished(policy)
        return tuple((before[run.seed], run) for run in own if run.seed in before)

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
        checks.choice("measure", measure, table.measures_of(self.runs))
        values = [
            [table.value_of(run, measure) for run in pair]
            for pair in self.pairs(policy, reference)
        ]
        return interval_of_ratios([b / a for a, b in values if a and b])

    def table(self) -> str:
        """Returns verdict, figures and ratios as text of at most 110 columns."""
        return table.table(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as a page that opens offline; writes it, if given a path.

        Raises:
            ImportError: jinja2 or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        return page.to_html(self, path)


def conclude(
    runs: Sequence[Run],
    *,
    metric: str | None,
    better: Better | None,
    tolerance: float | None,
    examples: PerExample = lambda pairs, metric: None,
    **given: Any,
) -> Comparison:
    """Returns the comparison of runs, at least one of them finished.

    `examples` gives the differences of a metric on each example of pairs of runs,
    `given` has the other fields (title, policies, seeds, context, notes).
    """
    metric = judgement.choose_metric(runs, metric)
    better = better or judgement.direction(metric)
    policies, seeds = given["policies"], given["seeds"]
    reference = judgement.choose_reference(policies, runs)
    own = [run for run in runs if run.policy == reference and run.is_finished]
    values = [run.final_metrics.get(metric, math.nan) for run in own]
    tolerance = judgement.allowed(tolerance, better, values)

    def order(run: Run) -> tuple[int, int]:
        return seeds.index(run.seed), policies.index(run.policy)

    first = Comparison(
        reference=reference,
        metric=metric,
        better=better,
        tolerance=tolerance,
        on_validation=any(n.startswith("val_") for run in runs for n in run.history),
        runs=tuple(sorted(runs, key=order)),
        verdicts={},
        **given,
    )
    verdicts = {}
    for policy in first.candidates:
        both = [run for run in first.runs if run.policy in (reference, policy)]
        verdicts[policy] = judgement.verdict_on(
            first.pairs(policy),
            [run for run in both if not run.is_finished],
            metric=metric,
            better=better,
            tolerance=tolerance,
            examples=examples(first.pairs(policy), metric),
        )
    notes = [
        f"{first.label(policy)} came to {run.resolved_policy}: {run.reason}"
        for policy in policies
        for run in first.finished(policy)[:1]
        if policy.startswith("auto")
    ]
    notes += first.notes
    notes += [f"{first.label(run.policy)}: {n}" for run in runs for n in run.notes]
    return dataclasses.replace(
        first, verdicts=verdicts, notes=tuple(dict.fromkeys(notes))
    )
