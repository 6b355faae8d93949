"""The table of a comparison as rows of text, for every form that a report takes."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence, effects_of
from tfamp.comparison.figures import Measure, measures_of
from tfamp.comparison.verdict import quality_effect
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import Effect, Interval, interval

# Beside the word, so that colour is never alone.
SIGNS: dict[Effect, str] = {
    "better": "+",
    "worse": "\u2212",
    "as good": "=",
    "same": "=",
    "unclear": "?",
    "one seed": "?",
    "": "",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What a policy has of a measure.

    Its mean over seeds, the ratio to the reference ("1.92×") or difference
    ("+0.001"), where the true one may lie, and what that comes to; "" where there is
    none or one seed does not tell.
    """

    policy: str
    value: str
    change: str = ""
    interval: str = ""
    effect: Effect = ""

    @property
    def sign(self) -> str:
        """The sign of the effect."""
        return SIGNS[self.effect]


@dataclasses.dataclass(frozen=True)
class Row:
    """A measure under every policy, under the heading of its group.

    `name` is as `Evidence.ratio` takes it, "" for others; `cells` are those of the
    candidates, in their order.
    """

    group: str
    name: str
    label: str
    unit: str
    reference: str
    cells: tuple[Cell, ...]

    @property
    def heading(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def rows(evidence: Evidence) -> tuple[Row, ...]:
    """Returns the rows of the table: quality, speed, memory, inference, numerics.

    Quality is the mean over seeds and its difference from the reference's, all else the
    geometric mean and its ratio, so that a ratio is that of the figures beside it.
    Where not all runs have their pair it is of the pairs alone and says "paired", as
    all intervals are. Of measures that answer one question one has an effect.
    """
    effects = effects_of(evidence)
    return (
        *_quality_rows(evidence),
        *(_measure_row(evidence, each, effects) for each in measures_of(evidence.runs)),
        *_numerics(evidence),
    )


def middle(evidence: Evidence, policy: str, of: Callable[[Run], float | None]) -> float:
    """Returns the mean over a policy's finished runs, NaN where none has it.

    It is geometric where all are above 0: then ratios of means are means of ratios.
    """
    values = [of(run) for run in evidence.finished(policy)]
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return math.nan
    if min(known) <= 0:
        return float(np.mean(known))
    return float(np.exp(np.mean(np.log(known))))


def are_paired(
    evidence: Evidence, policy: str, of: Callable[[Run], float | None]
) -> bool:
    """Whether each run that has a figure has its pair, which has it too."""
    has = [
        {run.seed for run in evidence.finished(each) if of(run)}
        for each in (policy, evidence.reference)
    ]
    return has[0] == has[1]


def quality(evidence: Evidence, policy: str) -> Interval:
    """Returns the difference of the metric, above 0 where the policy is better.

    It is the verdict's own where that has one.
    """
    verdict = evidence.verdicts.get(policy)
    if verdict is not None and math.isfinite(verdict.quality.estimate):
        return verdict.quality
    return _difference(evidence, policy, lambda run: final(evidence, run))


def final(evidence: Evidence, run: Run) -> float:
    """Returns the metric after the last epoch, NaN where the run has none."""
    return run.final_metrics.get(evidence.metric, math.nan)


def history_of(evidence: Evidence, run: Run) -> tuple[float, ...]:
    """Returns the metric after each epoch, of validation data where there is."""
    prefix = "val_" if evidence.on_validation else ""
    return run.history.get(f"{prefix}{evidence.metric}", ())


def _difference(
    evidence: Evidence, policy: str, of: Callable[[Run], float]
) -> Interval:
    """Returns the difference of a metric, paired by seed, above 0 where better."""
    sign = 1 if evidence.better == "max" else -1
    values = [sign * (of(b) - of(a)) for a, b in evidence.pairs(policy)]
    values = [value for value in values if math.isfinite(value)]
    return interval(values)


def _quality_rows(evidence: Evidence) -> list[Row]:
    """Returns the rows of the last and of the best epoch that any run has values of."""
    where = "validation" if evidence.on_validation else "training"
    pick = max if evidence.better == "max" else min

    def last(run: Run) -> float:
        return final(evidence, run)

    def best(run: Run) -> float:
        values = [v for v in history_of(evidence, run) if math.isfinite(v)]
        return pick(values, default=math.nan)

    labels = {
        f"{evidence.metric}, {where}": last,
        f"best {evidence.metric} of an epoch": best,
    }
    finished = [run for run in evidence.runs if run.is_finished]
    return [
        _quality_row(evidence, label, of, is_last=of is last)
        for label, of in labels.items()
        if not all(math.isnan(of(run)) for run in finished)
    ]


def _quality_row(
    evidence: Evidence, label: str, of: Callable[[Run], float], *, is_last: bool
) -> Row:
    form = figures.metric_format(evidence.tolerance)

    def mean(policy: str) -> str:
        values = [of(run) for run in evidence.finished(policy)]
        if values and not np.isfinite(values).all():
            return "not a number"
        return form(float(np.mean(values)) if values else None)

    def cell(policy: str) -> Cell:
        # The metric of the last epoch answers for the best one.
        effect: Effect = ""
        if is_last:
            found = quality(evidence, policy)
            effect = _metric_effect(evidence, policy, found)
        else:
            found = _difference(evidence, policy, of)
        ends = (found.estimate, found.low, found.high)
        if evidence.better == "min":
            ends = (-found.estimate, -found.high, -found.low)
        change, low, high = (
            form(value, sign=True) if math.isfinite(value) else "" for value in ends
        )
        between = f"{low} to {high}" if low and high else ""
        if change and not are_paired(evidence, policy, lambda _: 1.0):
            change += " paired"
        return Cell(policy, mean(policy), change, between, effect)

    cells = tuple(map(cell, evidence.candidates))
    return Row("Quality", "", label, "", mean(evidence.reference), cells)


def _metric_effect(evidence: Evidence, policy: str, found: Interval) -> Effect:
    """Returns what the verdict says of the metric."""
    if not math.isfinite(found.estimate):
        return ""
    if not figures.is_known(found):
        return "one seed"
    verdict = evidence.verdicts.get(policy)
    if verdict is not None and verdict.quality_effect:
        return verdict.quality_effect
    return quality_effect(found, evidence.tolerance)


def _measure_row(
    evidence: Evidence, measure: Measure, effects: Mapping[tuple[str, str], Effect]
) -> Row:
    medians = {p: middle(evidence, p, measure.of) for p in evidence.policies}
    form = figures.format_for(measure.unit, medians.values())
    if measure.name.startswith("latency_"):
        # One unit for all percentiles of a batch size.
        size = measure.name.rpartition("_")[2]
        values = [
            middle(evidence, policy, other.of)
            for other in measures_of(evidence.runs)
            if re.fullmatch(f"latency_.*_{size}", other.name)
            for policy in evidence.policies
        ]
        unit = figures.format_for(measure.unit, values)
        form = figures.finer(unit, medians.values())

    def cell(policy: str) -> Cell:
        found = evidence.ratio(measure.name, policy)
        if not math.isfinite(found.estimate):
            return Cell(policy, form(medians[policy]))
        change = f"{figures.ratio(found.estimate)}×"
        if not are_paired(evidence, policy, measure.of):
            change += " paired"
        effect = effects.get((policy, measure.name), "")
        return Cell(policy, form(medians[policy]), change, figures.ends(found), effect)

    return Row(
        measure.group,
        measure.name,
        measure.label,
        form.unit,
        form(medians[evidence.reference]),
        tuple(map(cell, evidence.candidates)),
    )


def _numerics(evidence: Evidence) -> Sequence[Row]:
    """Returns rows without ratio: what went wrong in the numbers."""
    each: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
        ("skipped steps", lambda run: float(run.skipped_steps)),
        ("NaN and inf in weights", lambda run: float(run.num_nonfinite_weights)),
    )
    found = []
    for label, of in each:
        values = {p: middle(evidence, p, of) for p in evidence.policies}
        # Nothing skipped anywhere is worth no line.
        if not any(math.isfinite(value) and value for value in values.values()):
            continue
        form = figures.Format(1.0, "", 0)
        cells = tuple(Cell(p, form(values[p])) for p in evidence.candidates)
        first = form(values[evidence.reference])
        found.append(Row("Numerics", "", label, "", first, cells))
    return found
