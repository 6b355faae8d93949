"""The figures of a comparison as rows, and what they come to in sentences."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfamp.comparison.judgement import are_same
from tfamp.records import checks, console
from tfamp.records.units import join_words
from tfamp.trials import tasks
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import Effect, Interval, effect_of_ratio
from tfamp.trials.variant import Variant

# That of result.py, which imports this file.
Comparison: TypeAlias = Any

# Policies beside the reference that fit into the width of a terminal.
_IN_A_TABLE = 2
_CELL = 44  # letters of a cell in one line
_MAX_ERROR = 300  # of an error in a sentence
_SIGNS = {"better": "+", "worse": "-", "as good": "=", "same": "=", "": ""}
_LEGEND = (
    "+ better, - worse, = the same, ? not clear; means over seeds, their ratios, and "
    "where these may lie with 5 % error on each side"
)
# What each answer says to do, in the words of a table.
WORDS = {
    "equivalent and faster": "use it",
    "equivalent, not faster": "same speed",
    "slower": "slower",
    "worse": "less accurate",
    "undecided": "not enough runs",
}
_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")),
    "J": ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")),
    "examples/s": ((1.0, "examples/s"),),
    "": ((1.0, ""),),
}


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of a run: all that tables, the page and `ratio` know of it.

    `of` gives the value of a finished run, None where it was not measured.
    `answered_by` names the measure that answers the same question for it.
    """

    name: str
    label: str
    unit: str
    of: Callable[[Run], float | None]
    more_is_better: bool = False
    answered_by: str = ""


def _memory(name: str) -> Callable[[Run], float | None]:
    """Returns what gives a peak, of a process above the some 500 MiB of its start."""

    def of(run: Run) -> float | None:
        found = None if run.memory is None else getattr(run.memory, name)
        if found is None or run.memory is None or name.startswith("device"):
            return found
        return float(max(found - run.memory.start_bytes, 0))

    return of


SPEED = "examples_per_second"
MEASURES = (
    Measure(SPEED, "training", "examples/s", lambda r: r.examples_per_second, True),
    Measure(
        *("step_seconds", "training step", "s", lambda r: r.step and r.step.median),
        answered_by=SPEED,
    ),
    Measure(
        "first_step_seconds", "time to first step", "s", lambda r: r.first_step_seconds
    ),
    Measure("training_bytes", "peak memory", "bytes", _memory("training_bytes")),
    Measure("device_bytes", "peak GPU memory", "bytes", _memory("device_bytes")),
    Measure("energy_joules", "energy", "J", lambda r: r.energy_joules),
    Measure("file_bytes", "saved model", "bytes", lambda r: r.file_bytes),
)
# Without ratio, and only where there were any.
_COUNTS = (
    Measure("skipped_steps", "skipped steps", "", lambda r: r.skipped_steps),
    Measure("nonfinite", "NaN in weights", "", lambda r: r.num_nonfinite_weights),
)


def _of_latency(size: int) -> Iterator[Measure]:
    def of(field: str) -> Callable[[Run], float | None]:
        return lambda run: getattr(run.latency(size), field, None)

    median = f"latency_p50_batch_{size}"
    for name in ("p50", "p90", "p99"):
        label = f"latency {name}, batch {size}"
        by = "" if name == "p50" else median
        given = (f"latency_{name}_batch_{size}", label, "s", of(f"{name}_seconds"))
        yield Measure(*given, answered_by=by)
    rate = f"inference_{SPEED}_batch_{size}", f"inference, batch {size}", "examples/s"
    yield Measure(*rate, of(SPEED), True, median)


def measures_of(runs: Sequence[Run]) -> list[Measure]:
    """Returns the measures that at least one of the runs has."""
    sizes = sorted({each.batch_size for run in runs for each in run.latencies})
    every = [*MEASURES, *(each for size in sizes for each in _of_latency(size))]
    finished = [run for run in runs if run.is_finished]
    return [m for m in every if any(m.of(run) for run in finished)]


def find(name: str, runs: Sequence[Run]) -> Measure:
    """Returns the measure of a name; ValueError that lists them where no run has it."""
    by_name = {measure.name: measure for measure in measures_of(runs)}
    if not by_name:
        raise ValueError(
            f"No run has a `measure` {name!r}, since none has finished; expected one "
            "finished run at least. Look at the errors in `.runs`."
        )
    return by_name[checks.choice("measure", name, by_name)]


@dataclasses.dataclass(frozen=True)
class Cell:
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
class Row:
    """A measure under every policy."""

    name: str
    heading: str
    cells: dict[str, Cell]


def rows(found: Comparison) -> list[Row]:
    """Returns the rows of the table: quality, measures, what went wrong in numbers.

    Quality is the mean over seeds and its difference from the reference's, all else the
    geometric mean and its ratio, so that a ratio is that of the figures beside it;
    where a run failed, and its pair is left out, it says "paired".
    """
    measured = [_measure_row(found, each) for each in measures_of(found.runs)]
    counts = [_measure_row(found, m) for m in _COUNTS if any(map(m.of, found.runs))]
    return [_quality_row(found), *measured, *counts]


def mean(found: Comparison, policy: str, measure: Measure) -> float:
    """Returns the mean over a policy's runs, geometric where all are above 0."""
    values = [v for v in map(measure.of, found.finished(policy)) if v is not None]
    if not values:
        return math.nan
    if min(values) <= 0:
        return float(np.mean(values))
    return float(np.exp(np.mean(np.log(values))))


def _measure_row(found: Comparison, measure: Measure) -> Row:
    means = {policy: mean(found, policy, measure) for policy in found.policies}
    unit, texts = scaled(measure.unit, list(means.values()))
    cells = {}
    for policy, text in zip(means, texts, strict=True):
        ratios = found.ratios(measure, policy) if measure.label else []
        cell = Cell(text)
        if policy != found.reference and ratios and measure not in _COUNTS:
            ratio = found.ratio(measure.name, policy)
            more = measure.more_is_better
            effect = effect_of_ratio(ratio, more_is_better=more)
            if _are_all_same(found, policy):
                effect = "same"
            cell = Cell(
                text,
                f"{_digits(ratio.estimate)}x{_paired(found, policy)}",
                _between(ratio, _digits),
                "" if measure.answered_by else effect,
            )
        cells[policy] = cell
    heading = f"{measure.label} ({unit})" if unit else measure.label
    return Row(measure.name, heading, cells)


def _quality_row(found: Comparison) -> Row:
    decimals = metric_decimals(found.tolerance)
    cells = {}
    for policy in found.policies:
        values = [
            run.final_metrics.get(found.metric, math.nan)
            for run in found.finished(policy)
        ]
        text = f"{np.mean(values):,.{decimals}f}" if values else "-"
        if values and not np.isfinite(values).all():
            text = "not a number"
        verdict = found.verdicts.get(policy)
        cell = Cell(text)
        if verdict is not None and math.isfinite(verdict.quality.estimate):
            change = verdict.quality
            if found.better == "min":
                change = Interval(-change.estimate, -change.high, -change.low)

            def signed(value: float) -> str:
                return f"{round(value, decimals) + 0.0:+,.{decimals}f}"

            cell = Cell(
                text,
                signed(change.estimate) + _paired(found, policy),
                _between(change, signed),
                verdict.quality_effect or "unclear",
            )
        cells[policy] = cell
    where = "validation" if found.on_validation else "training"
    return Row("metric", f"{found.metric}, {where}", cells)


def metric_decimals(tolerance: float, digits: int = 2) -> int:
    """Returns how many decimals a metric needs for the digits of its tolerance."""
    if not (math.isfinite(tolerance) and tolerance > 0):
        return 4
    return min(max(digits - 1 - math.floor(math.log10(tolerance)), 0), 9)


def scaled(unit: str, values: Sequence[float]) -> tuple[str, list[str]]:
    """Returns the unit in which the least of some values has three digits, and those.

    Example:
        >>> scaled("s", [0.0641, 0.0337]), scaled("bytes", [2.0**29, 1.2 * 2**30])
        (('ms', ['64.1', '33.7']), ('MiB', ['512', '1,229']))
    """
    known = [abs(v) for v in values if math.isfinite(v) and v]
    least = min(known, default=1.0)
    scales = _UNITS[unit]
    factor, name = next((s for s in scales if least >= 0.9995 * s[0]), scales[-1])
    decimals = 0 if unit == "" else 2 - math.floor(math.log10(least / factor) + 1e-9)
    decimals = min(max(decimals, 0), 3)
    texts = [f"{v / factor:,.{decimals}f}" if math.isfinite(v) else "-" for v in values]
    return name, texts


def _digits(ratio: float) -> str:
    if abs(ratio) < 0.095:
        return f"{ratio:.3f}"
    return f"{ratio:.2f}" if abs(ratio) < 99.5 else f"{ratio:,.0f}"


def _between(found: Interval, text: Callable[[float], str]) -> str:
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ""
    return f"{text(found.low)} to {text(found.high)}"


def _paired(found: Comparison, policy: str) -> str:
    seeds = [{r.seed for r in found.finished(p)} for p in (policy, found.reference)]
    return "" if seeds[0] == seeds[1] else " paired"


def _are_all_same(found: Comparison, policy: str) -> bool:
    pairs = found.pairs(policy)
    return bool(pairs) and all(are_same(*pair) for pair in pairs)


# Sentences


def verdict_sentence(found: Comparison) -> str:
    """Returns what the comparison comes to: the sentence on the best policy."""
    return policy_sentence(found, found.best)


def policy_sentence(found: Comparison, policy: str) -> str:
    """Returns what a candidate comes to, with the figures that decide."""
    verdict, name = found.verdicts[policy], named(found, policy)
    reference, pairs = found.label(found.reference), found.pairs(policy)
    if not pairs:
        failed = [r for r in found.runs if not r.is_finished]
        own = [r for r in failed if r.policy in (policy, found.reference)]
        why = "no two runs have the same seed"
        if own:
            name_of_run = f"{found.label(own[0].policy)} with seed {own[0].seed}"
            why = f"{name_of_run} failed with {shortened(own[0].error)}"
        return (
            f"Nothing is known of {name}: no seed finished both under it and under "
            f"{reference}; {why}."
        )
    adjective = "accurate" if "acc" in found.metric.lower() else "good"
    alike = f"as {adjective} as {reference}"
    lead = {
        "equivalent and faster": f"{name} is {alike} and faster",
        "equivalent, not faster": f"{name} is {alike}, but not faster",
        "slower": f"{name} is slower than {reference}",
        "worse": f"{name} is less {adjective} than {reference}",
        "undecided": f"Not decided yet whether {name} is {alike} and faster",
    }[verdict.answer]
    decimals = metric_decimals(found.tolerance, digits=1)
    means = []
    for runs in zip(*pairs, strict=True):
        each = float(np.mean([r.final_metrics.get(found.metric, np.nan) for r in runs]))
        means.append(f"{each:,.{decimals}f}" if math.isfinite(each) else "not a number")
    seeds = "1 seed" if verdict.num_seeds == 1 else f"{verdict.num_seeds} seeds"
    return (
        f"{lead}: {found.metric} {means[1]} against {means[0]}, {seeds}; "
        f"{shortened(verdict.reason)}."
    )


def advice(found: Comparison, policy: str) -> str:
    """Returns what to do about a policy, in one sentence."""
    verdict, reference = found.verdicts[policy], found.label(found.reference)
    if not found.pairs(policy):
        return "Look at the errors of the runs, and measure again."
    if verdict.answer == "equivalent and faster":
        return f"Use it: {how_to_use(policy)}."
    if verdict.answer == "equivalent, not faster" and _are_all_same(found, policy):
        name = found.label(policy)
        return f"{name} costs nothing here, and pays on machines that can do more."
    return {
        "equivalent, not faster": f"Stay with {reference}, unless it is memory or size "
        "that you need.",
        "worse": f"Stay with {reference}, or keep the layers that lose it in float32 "
        "(keep_float32=).",
        "slower": f"Stay with {reference}.",
        "undecided": f"{verdict.needs[:1].upper()}{verdict.needs[1:]}.",
    }[verdict.answer]


def how_to_use(policy: str) -> str:
    """Returns the lines of code that turn a policy on."""
    variant = Variant.parse(policy)
    none = "" if variant.has_rules else ", keep_float32='none'"
    call = f"tfamp.enable({variant.policy!r}{none})"
    if tasks.is_plan_file(variant.policy):
        # What was given is a plan itself; its file may be gone.
        call = "tfamp.enable(plan)"
    if variant.is_stock:
        call = f"keras.config.set_dtype_policy({variant.policy!r})"
    steps = [f"{call} before the model is built"]
    if variant.jit_compile:
        steps.append("compile(jit_compile=True)")
    if variant.rewrite:
        steps.append("TensorFlow's graph rewrite for bfloat16")
    return ", ".join(steps)


def reference_sentence(found: Comparison) -> str:
    """Returns which policy the others are held against, and why that one."""
    plain = [policy for policy in found.policies if Variant.parse(policy).is_float32]
    name = found.label(found.reference)
    if found.reference not in plain:
        return f"Compared with {name}, the first policy, since none is float32."
    if len(plain) == 1:
        return f"Compared with {name}."
    _, texts = scaled("examples/s", [mean(found, each, MEASURES[0]) for each in plain])
    each = [f"{policy} {text}" for policy, text in zip(plain, texts, strict=True)]
    return (
        f"Compared with {name}, the fastest of {len(plain)} ways to train in float32 "
        f"({join_words(each)} examples/s); a gain over a slower one would be none."
    )


def named(found: Comparison, policy: str) -> str:
    """Returns a policy with what it came to, where that is another name."""
    name, runs = found.label(policy), found.finished(policy)
    came_to = runs[0].resolved_policy if runs else ""
    return name if came_to in name else f"{name} ({came_to})"


def failures(found: Comparison) -> str:
    """Returns how many runs failed, "" if none did."""
    number = sum(not run.is_finished for run in found.runs)
    return f"{number} of {len(found.runs)} runs failed." if number else ""


def shortened(error: str) -> str:
    r"""Returns the first line of an error, cut.

    Example:
        >>> shortened("ValueError: no such layer.\n  at line 3")
        'ValueError: no such layer'
    """
    first = next((line for line in error.strip().splitlines() if line), "no error text")
    first = first.rstrip(".")
    return first if len(first) <= _MAX_ERROR else f"{first[: _MAX_ERROR - 3]}..."


def table(found: Comparison) -> str:
    """Returns each measure under each policy as text, and the verdict last."""
    lines = rows(found)
    parts: list[object] = []
    for start in range(0, len(found.candidates), _IN_A_TABLE):
        chosen = found.candidates[start : start + _IN_A_TABLE]
        names = [named(found, policy) for policy in (found.reference, *chosen)]
        right = {"justify": "right", "overflow": "fold"}
        columns = {"": {**console.FOLD, "max_width": 29}, **dict.fromkeys(names, right)}
        texts = [
            (
                row.heading,
                row.cells[found.reference].value,
                *(_text(row.cells[policy], len(chosen)) for policy in chosen),
            )
            for row in lines
        ]
        parts.append(console.table(columns, texts, title=found.title, box=None))
    others = [p for p in found.candidates if p != found.best]
    sentences = [
        _LEGEND,
        reference_sentence(found),
        failures(found),
        *(policy_sentence(found, policy) for policy in others),
        advice(found, found.best),
        # Last, where the eye ends up.
        f"Verdict: {verdict_sentence(found)}",
    ]
    return console.text_of(*parts, *filter(None, sentences))


def _text(cell: Cell, number: int) -> str:
    """Returns "1,903 1.90x (1.88 to 1.92) +", on two lines where it is longer."""
    between = f"({cell.interval})" if cell.interval else ""
    line = f"{cell.value} {cell.change:>6} {between} {cell.sign:1}".rstrip()
    if not cell.change or len(line) <= _CELL / number + 8 * (number > 1):
        return line
    return f"{cell.value} {cell.change:>6} {cell.sign}\n{between}  "
