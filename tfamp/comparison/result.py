"""From the runs of a comparison to what it comes to, as a table and in sentences."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np

from tfamp.comparison import page
from tfamp.comparison import verdict as judgment
from tfamp.comparison.verdict import Answer, Better, Verdict
from tfamp.records import checks, console, units
from tfamp.records.record import TableRecord
from tfamp.trials.run_records import Context, Run
from tfamp.trials.statistics import (
    Effect,
    Interval,
    effect_of_ratio,
    interval_of_ratios,
)
from tfamp.trials.variant import Variant, short_names

PerExample = Callable[[Sequence[tuple[Run, Run]], str], np.ndarray | None]
_MAX_ERROR = 300  # letters of an error in a sentence
_SIGNS = {"better": "+", "worse": "-", "as good": "=", "same": "=", "": ""}
# Each answer in a table, at the start of a sentence, and what to do about it.
_WORDS = {
    "equivalent and faster": (
        *("use it", "{name} is as {good} as {reference} and faster"),
        "Use it: {how}.",
    ),
    "equivalent, not faster": (
        *("same speed", "{name} is as {good} as {reference}, but not faster"),
        "Stay with {reference}, unless it is memory or size that you need.",
    ),
    "slower": (
        *("slower", "{name} is slower than {reference}"),
        "Stay with {reference}.",
    ),
    "worse": (
        *("less accurate", "{name} is less {good} than {reference}"),
        "Stay with {reference}, or keep the layers that lose it in float32 "
        "(keep_float32=).",
    ),
    "undecided": (
        "not enough runs",
        "Not decided yet whether {name} is as {good} as {reference} and faster",
        "{needs}.",
    ),
}


# Names of figures of a run -> their headings.
_HEADINGS = {
    "examples_per_second": "training (examples/s)",
    "training_bytes": "peak memory",
    "device_bytes": "peak GPU memory",
    "energy_joules": "energy (J)",
    "step_seconds": "step",
    "first_step_seconds": "first step",
    "skipped_steps": "skipped steps",
    "num_nonfinite_weights": "NaN in weights",
}
_COUNTS = ("skipped_steps", "num_nonfinite_weights")  # which have no ratio


class Cell(NamedTuple):
    """A figure of a policy, its change against the reference and where that may lie."""

    value: str
    change: str = ""
    interval: str = ""
    effect: Effect = ""

    @property
    def sign(self) -> str:
        """The effect as one sign."""
        return _SIGNS.get(self.effect, "?")


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

        It is the geometric mean over seeds and its interval, whose ends are infinite or
        0 for one seed; all NaN where no pair of runs has the measure.

        Raises:
            ValueError: The measure, such as "examples_per_second", "training_bytes" or
                "latency_p50_batch_1", or the policy is unknown; it names them all.
        """
        checks.choice("measure", measure, _known(self.runs))
        pairs = [map(_figures, pair) for pair in self.pairs(policy, reference)]
        values = [[each.get(measure) for each in pair] for pair in pairs]
        return interval_of_ratios([b / a for a, b in values if a and b])

    def columns(self) -> dict[str, dict[str, Cell]]:
        """Returns heading -> policy -> cell; ratios are those of the figures beside."""
        known = _known(self.runs)
        latencies = [name for name in known if name.startswith("latency_p50")][:1]
        names = ("training_bytes", "device_bytes", *latencies, "energy_joules")
        where = "validation" if self.on_validation else "training"
        table = {}
        for name in ("examples_per_second", "", *names, *_COUNTS):
            if not name:
                table[f"{self.metric}, {where}"] = {
                    policy: self._quality(policy) for policy in self.policies
                }
            elif name in known:
                table[known[name]] = {p: self._measured(p, name) for p in self.policies}
        return table

    def _measured(self, policy: str, name: str) -> Cell:
        every = [_figures(run).get(name) for run in self.finished(policy)]
        values = [value for value in every if value is not None]
        text: Callable[[float], str] = _number
        if name.endswith("bytes"):
            text = units.format_bytes
        elif name.startswith("latency"):
            text = units.format_seconds
        if not values:
            return Cell("-")
        if name in _COUNTS or min(values) <= 0:
            return Cell(text(float(np.mean(values))))
        value, ratio = text(math.exp(np.mean(np.log(values)))), self.ratio(name, policy)
        if policy == self.reference or math.isnan(ratio.estimate):
            return Cell(value)
        effect = effect_of_ratio(ratio, more_is_better=name == "examples_per_second")
        if all(judgment.are_same(*pair) for pair in self.pairs(policy)):
            effect = "same"
        change = f"{_digits(ratio.estimate)}x{self._paired(policy)}"
        return Cell(value, change, _between(ratio, _digits), effect)

    def _quality(self, policy: str) -> Cell:
        text = self._mean_metric(self.finished(policy))
        verdict = self.verdicts.get(policy)
        if verdict is None or not math.isfinite(verdict.quality.estimate):
            return Cell(text)
        change = verdict.quality
        if self.better == "min":
            change = Interval(-change.estimate, -change.high, -change.low)
        told = _signed(change.estimate) + self._paired(policy)
        effect: Effect = verdict.quality_effect or "unclear"
        return Cell(text, told, _between(change, _signed), effect)

    def _paired(self, policy: str) -> str:
        seeds = [{r.seed for r in self.finished(p)} for p in (policy, self.reference)]
        return "" if seeds[0] == seeds[1] else " paired"

    def _mean_metric(self, runs: Sequence[Run]) -> str:
        values = [run.final_metrics.get(self.metric, math.nan) for run in runs]
        if not np.isfinite(values).all():
            return "not a number"
        return _number(float(np.mean(values))) if values else "unknown"

    def word(self, policy: str) -> str:
        """Returns the verdict on a policy in the words of the table."""
        if policy == self.reference:
            return "reference"
        return _WORDS[self.verdicts[policy].answer][0]

    def name(self, policy: str) -> str:
        """Returns a policy with what it came to, where that is another name."""
        name, runs = self.label(policy), self.finished(policy)
        came_to = runs[0].resolved_policy if runs else ""
        return name if came_to in name else f"{name} ({came_to})"

    def sentences(self, policy: str) -> tuple[str, str]:
        """Returns what a candidate comes to, with the figures, and what to do then."""
        verdict, pairs = self.verdicts[policy], self.pairs(policy)
        _, lead, advice = _WORDS[verdict.answer]
        if verdict.quality_effect == "same":  # it came to the reference itself
            advice = (
                f"{self.label(policy)} costs nothing here, and pays on machines that "
                "can do more."
            )
        words = {
            "name": self.name(policy),
            "reference": self.label(self.reference),
            "good": "accurate" if "acc" in self.metric.lower() else "good",
            "how": _how_to_use(policy),
            "needs": f"{verdict.needs[:1].upper()}{verdict.needs[1:]}",
        }
        before, after = (
            self._mean_metric([pair[place] for pair in pairs]) for place in (0, 1)
        )
        seeds = "1 seed" if verdict.num_seeds == 1 else f"{verdict.num_seeds} seeds"
        first = verdict.reason.strip().partition("\n")[0].rstrip(".")
        if len(first) > _MAX_ERROR:
            first = f"{first[: _MAX_ERROR - 3]}..."
        return (
            f"{lead.format(**words)}: {self.metric} {after} against {before}, {seeds}; "
            f"{first}.",
            advice.format(**words),
        )

    def legend(self) -> str:
        """Returns what the signs and figures of the table mean."""
        return (
            "+ better, - worse, = the same, ? not clear; means over seeds, ratios to "
            f"{self.label(self.reference)}, and where these may lie with 5 % error on "
            "each side"
        )

    def reference_sentence(self) -> str:
        """Returns which policy the others are held against, and why that one."""
        plain = [p for p in self.policies if Variant.parse(p).policy == "float32"]
        why = ""
        if self.reference not in plain:
            why = ", the first policy, since none is float32"
        elif len(plain) > 1:
            why = f", the fastest of {len(plain)} ways to train in float32"
        return f"Compared with {self.label(self.reference)}{why}."

    def table(self) -> str:
        """Returns verdict, figures and ratios as text of at most 110 columns."""
        shown, lines = self.columns(), []
        for policy in (self.reference, *self.candidates):
            texts = []
            for cells in shown.values():
                cell = cells[policy]
                between = f"({cell.interval})" if cell.interval else ""
                change = f"{cell.change} {cell.sign}".strip()
                texts.append("\n".join(filter(None, (cell.value, change, between))))
            lines.append((f"{self.name(policy)}\n{self.word(policy)}", *texts))
        right = {"justify": "right", "overflow": "fold"}
        heads: dict[str, Any] = {"policy": console.FOLD, **dict.fromkeys(shown, right)}
        number = sum(not run.is_finished for run in self.runs)
        sentence, advice = self.sentences(self.best)
        told = [
            *(f"Note: {note}" for note in self.notes),
            self.legend(),
            self.reference_sentence(),
            f"{number} of {len(self.runs)} runs failed." if number else "",
            *(self.sentences(p)[0] for p in self.candidates if p != self.best),
            advice,
            f"Verdict: {sentence}",  # last, where the eye ends up
        ]
        text = console.table(
            heads, lines, title=self.title, box=None, padding=(0, 2, 1, 0)
        )
        return console.text_of(text, *filter(None, told))

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns a page that opens offline and writes it, if given a path."""
        return page.to_html(self, path)


def _figures(run: Run) -> dict[str, float | None]:
    """Returns the figures of a run by name, None where they were not measured."""
    found: dict[str, float | None] = {n: getattr(run, n, None) for n in _HEADINGS}
    memory = run.memory
    if memory is not None:
        found["device_bytes"] = memory.device_bytes
        if memory.training_bytes is not None:
            # Above the some 500 MiB that a process starts with.
            found["training_bytes"] = max(memory.training_bytes - memory.start_bytes, 0)
    for each in run.latencies:
        for part in ("p50", "p90", "p99"):
            seconds = getattr(each, f"{part}_seconds")
            found[f"latency_{part}_batch_{each.batch_size}"] = seconds
    return found


def _known(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the names of figures that a finished run has, and their headings."""
    found = [_figures(run) for run in runs if run.is_finished]
    names = dict.fromkeys(name for each in found for name, x in each.items() if x)
    latency = "latency, batch {}"
    return {n: _HEADINGS.get(n) or latency.format(n.split("_")[-1]) for n in names}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+,.2g}"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.095 <= abs(ratio) < 99.5 else f"{ratio:,.3g}"


def _between(found: Interval, text: Callable[[float], str]) -> str:
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ""
    return f"{text(found.low)} to {text(found.high)}"


def _how_to_use(policy: str) -> str:
    """Returns the lines of code that turn a policy on."""
    variant = Variant.parse(policy)
    call = f"tfamp.enable({variant.policy!r})"
    if variant.is_plan and not os.path.isfile(variant.policy):
        call = "tfamp.enable(plan)"  # what was given is a plan itself
    if variant.is_stock:
        call = f"keras.config.set_dtype_policy({variant.policy!r})"
    steps = [f"{call} before the model is built"]
    steps += ["compile(jit_compile=True)"] * variant.jit_compile
    return ", ".join(steps)


def conclude(
    runs: Sequence[Run],
    *,
    metric: str | None,
    better: Better | None,
    tolerance: float | None,
    examples: PerExample = lambda pairs, metric: None,
    **given: Any,
) -> Comparison:
    """Returns the comparison of runs, at least one of them finished."""
    metric = judgment.choose_metric(runs, metric)
    better = better or judgment.direction(metric)
    policies, seeds = given["policies"], given["seeds"]
    reference = judgment.choose_reference(policies, runs)
    own = [run for run in runs if run.policy == reference and run.is_finished]
    values = [run.final_metrics.get(metric, math.nan) for run in own]
    tolerance = judgment.allowed(tolerance, better, values)

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
        verdicts[policy] = judgment.verdict_on(
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
    notes += [
        f"{first.label(run.policy)} diverged with seed {run.seed}: "
        f"{run.num_nonfinite_weights:,} weights are not finite. `tfamp triage` names "
        "the cause."
        for run in first.runs
        if run.num_nonfinite_weights
    ]
    notes += first.notes
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        whose = dict.fromkeys(first.label(r.policy) for r in runs if note in r.notes)
        is_of_all = len(whose) == len(policies)
        notes.append(note if is_of_all else f"{', '.join(whose)}: {note}")
    return dataclasses.replace(
        first, verdicts=verdicts, notes=tuple(dict.fromkeys(notes))
    )
