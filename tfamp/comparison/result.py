"""From the runs of a comparison to what it comes to."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfamp.comparison.evidence import Evidence, TunedPlan
from tfamp.comparison.judgement import (
    Better,
    allowed,
    choose_metric,
    choose_reference,
    direction,
    rule_cost,
    verdict_on,
)
from tfamp.comparison.report.html import to_html
from tfamp.comparison.report.text import table, to_markdown
from tfamp.trials.run_records import Context, Run
from tfamp.trials.storage import Job
from tfamp.trials.variant import Variant

PerExample = Callable[[Sequence[tuple[Run, Run]], str], np.ndarray | None]
# Other work on more than this part of the cores widens the intervals.
_BUSY = 0.5


@dataclasses.dataclass(frozen=True)
class Comparison(Evidence):
    """What a comparison measured and what it comes to; `print` shows it as a table.

    Its fields are those of `Evidence`: `.verdict` is the answer for the best policy,
    `.verdicts` has each with its reason, `.runs` every figure, and `.to_json(path)`
    writes all of it.
    """

    def __repr__(self) -> str:
        """Returns what it comes to in a line."""
        found = {p: verdict.answer for p, verdict in self.verdicts.items()}
        return (
            f"Comparison(title={self.title!r}, reference={self.reference!r}, "
            f"metric={self.metric!r}, verdicts={found!r}, runs=<{len(self.runs)}>)"
        )

    def table(self) -> str:
        """Returns verdict, figures and ratios as text of at most 110 columns."""
        return table(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the report as one page that opens without a network.

        Args:
            path: File to write it to; its folder exists.

        Raises:
            ImportError: jinja2 or matplotlib is not installed.
            OSError: The file cannot be written.
        """
        return to_html(self, path)

    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a summary in Markdown, and writes it where a path is given."""
        return to_markdown(self, path)

    def __str__(self) -> str:
        """Returns the table."""
        return self.table()


def conclude(
    job: Job,
    runs: Sequence[Run],
    *,
    metric: str | None,
    better: Better | None,
    tolerance: float | None,
    context: Context | None,
    notes: Sequence[str] = (),
    plans: Mapping[str, TunedPlan] | None = None,
    examples: PerExample = lambda pairs, metric: None,
) -> Comparison:
    """Returns the comparison of runs, at least one of them finished.

    `examples` gives the differences of a metric on each example of pairs of runs.
    """
    metric = choose_metric(runs, metric)
    better = better or direction(metric)
    reference = choose_reference(job.policies, runs)
    tolerance = allowed(
        *(tolerance, better),
        [
            r.final_metrics[metric]
            for r in runs
            if r.policy == reference and r.is_finished
        ],
    )
    first = Comparison(
        title=job.title,
        policies=job.policies,
        seeds=job.seeds,
        reference=reference,
        metric=metric,
        better=better,
        tolerance=tolerance,
        on_validation=any(
            name.startswith("val_") for run in runs for name in run.history
        ),
        runs=tuple(
            sorted(
                runs,
                key=lambda r: (job.seeds.index(r.seed), job.policies.index(r.policy)),
            )
        ),
        verdicts={},
        context=context,
        plans=dict(plans or {}),
    )
    verdicts = {
        policy: verdict_on(
            first.pairs(policy),
            [
                run
                for run in first.runs
                if run.policy in (reference, policy) and not run.is_finished
            ],
            metric=metric,
            better=better,
            tolerance=tolerance,
            examples=examples(first.pairs(policy), metric),
        )
        for policy in first.candidates
    }
    of_runs = (
        f"{first.label(run.policy)}: {note}" for run in runs for note in run.notes
    )
    sentences = (*_sentences(first), *notes, *of_runs)
    return dataclasses.replace(
        first, verdicts=verdicts, notes=tuple(dict.fromkeys(sentences))
    )


def load_note() -> tuple[str, ...]:
    """Returns a sentence where other programs keep the machine busy."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return ()
    cores = os.cpu_count() or 1
    if load <= _BUSY * cores:
        return ()
    return (
        f"The machine was busy when the comparison began (load {load:.1f} on {cores} "
        "cores), which makes times scatter; repeat it on an idle one for narrower "
        "intervals.",
    )


def _sentences(found: Comparison) -> tuple[str, ...]:
    """Returns what the choice of policies makes worth saying."""
    sentences = []
    plain = [p for p in found.policies if Variant.parse(p).is_float32]
    reference = found.label(found.reference)
    if len(plain) > 1:
        others = ", ".join(p for p in plain if p != found.reference)
        sentences.append(
            f"{reference} is the reference, since it was the fastest float32 "
            f"(faster than {others})."
        )
    elif not plain:
        sentences.append(
            f"{reference} is the reference, since no float32 was asked for."
        )
    for policy in found.policies:
        runs = found.finished(policy)
        if runs and policy.startswith("auto"):
            sentences.append(
                f"{policy} came to {runs[0].resolved_policy}: {runs[0].reason}"
            )
    by_policy = {policy: found.finished(policy) for policy in found.policies}
    return (*sentences, *rule_cost(by_policy))
