"""The figures of a comparison, a row a policy, and what they come to in sentences."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfamp.comparison.judgement import are_same
from tfamp.records import checks, console
from tfamp.trials import tasks
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import Effect, Interval, effect_of_ratio
from tfamp.trials.variant import Variant

# That of result.py, which imports this file.
Comparison: TypeAlias = Any

_MAX_ERROR = 300  # letters of an error in a sentence
_SIGNS = {"better": "+", "worse": "-", "as good": "=", "same": "=", "": ""}
LEGEND = (
    "+ better, - worse, = the same, ? not clear; means over seeds, ratios to {}, and "
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


class Measure(NamedTuple):
    """One figure of a run: all that tables, the page and `ratio` know of it."""

    name: str
    label: str
    unit: str
    of: Callable[[Run], float | None]  # None where it was not measured
    more_is_better: bool = False


def _memory(run: Run) -> float | None:
    """Returns the peak above the some 500 MiB that a process starts with."""
    if run.memory is None or run.memory.training_bytes is None:
        return None
    return float(max(run.memory.training_bytes - run.memory.start_bytes, 0))


SPEED = Measure(
    *("examples_per_second", "training", "examples/s"),
    *(lambda run: run.examples_per_second, True),
)
# Without ratio, and only where there were any.
_COUNTS = (
    Measure("skipped_steps", "skipped steps", "", lambda run: run.skipped_steps),
    Measure("nonfinite", "NaN in weights", "", lambda run: run.num_nonfinite_weights),
)


def measures_of(runs: Sequence[Run]) -> list[Measure]:
    """Returns the measures that at least one of the runs has."""
    every = [
        SPEED,
        Measure("training_bytes", "peak memory", "bytes", _memory),
        Measure(
            *("device_bytes", "peak GPU memory", "bytes"),
            lambda run: None if run.memory is None else run.memory.device_bytes,
        ),
        Measure("energy_joules", "energy", "J", lambda run: run.energy_joules),
        Measure("step_seconds", "step", "s", lambda run: run.step_seconds),
        Measure(
            *("first_step_seconds", "first step", "s"),
            lambda run: run.first_step_seconds,
        ),
    ]
    for size in sorted({each.batch_size for run in runs for each in run.latencies}):
        for part in ("p50", "p90", "p99"):

            def of(run: Run, size: int = size, part: str = part) -> float | None:
                return getattr(run.latency(size), f"{part}_seconds", None)

            name = f"latency_{part}_batch_{size}"
            every.append(Measure(name, f"latency, batch {size}", "s", of))
    finished = [run for run in runs if run.is_finished]
    return [each for each in every if any(each.of(run) for run in finished)]


def find(name: str, runs: Sequence[Run]) -> Measure:
    """Returns the measure of a name; ValueError that lists them where no run has it."""
    by_name = {measure.name: measure for measure in measures_of(runs)}
    if not by_name:
        raise ValueError(
            f"No run has a `measure` {name!r}, since none has finished; expected one "
            "finished run at least. Look at the errors in `.runs`."
        )
    return by_name[checks.choice("measure", name, by_name)]


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


class Column(NamedTuple):
    """A measure under every policy."""

    heading: str
    cells: dict[str, Cell]


def columns(found: Comparison) -> list[Column]:
    """Returns the columns of the table: speed, quality, memory, latency, trouble.

    Quality is the mean over seeds and its difference from the reference's, all else the
    geometric mean and its ratio, so that a ratio is that of the figures beside it;
    where a run failed, and its pair is left out, it says "paired".
    """
    by_name = {each.name: each for each in measures_of(found.runs)}
    latencies = [name for name in by_name if name.startswith("latency_p50")][:1]
    names = ("training_bytes", "device_bytes", *latencies, "energy_joules")
    shown = [by_name[name] for name in names if name in by_name]
    counts = [each for each in _COUNTS if any(map(each.of, found.runs))]
    speed = [_measured(found, SPEED)] if SPEED.name in by_name else []
    rest = [_measured(found, each) for each in (*shown, *counts)]
    return [*speed, _quality(found), *rest]


def mean(found: Comparison, policy: str, measure: Measure) -> float:
    """Returns the mean over a policy's runs, geometric where all are above 0."""
    values = [v for v in map(measure.of, found.finished(policy)) if v is not None]
    if not values:
        return math.nan
    if min(values) <= 0:
        return float(np.mean(values))
    return float(np.exp(np.mean(np.log(values))))


def _measured(found: Comparison, measure: Measure) -> Column:
    means = {policy: mean(found, policy, measure) for policy in found.policies}
    unit, texts = scaled(measure.unit, list(means.values()))
    cells = {}
    for policy, text in zip(means, texts, strict=True):
        cells[policy] = Cell(text)
        is_count = measure in _COUNTS or policy == found.reference
        if not is_count and found.ratios(measure, policy):
            ratio = found.ratio(measure.name, policy)
            effect = effect_of_ratio(ratio, more_is_better=measure.more_is_better)
            if all(are_same(*pair) for pair in found.pairs(policy)):
                effect = "same"
            change = f"{_digits(ratio.estimate)}x{_paired(found, policy)}"
            cells[policy] = Cell(text, change, _between(ratio, _digits), effect)
    return Column(f"{measure.label} ({unit})" if unit else measure.label, cells)


def _quality(found: Comparison) -> Column:
    decimals = metric_decimals(found.tolerance)

    def signed(value: float) -> str:
        return f"{round(value, decimals) + 0.0:+,.{decimals}f}"

    cells = {}
    for policy in found.policies:
        values = [
            run.final_metrics.get(found.metric, math.nan)
            for run in found.finished(policy)
        ]
        text = f"{np.mean(values):,.{decimals}f}" if values else "-"
        if values and not np.isfinite(values).all():
            text = "not a number"
        cells[policy] = Cell(text)
        verdict = found.verdicts.get(policy)
        if verdict is not None and math.isfinite(verdict.quality.estimate):
            change = verdict.quality
            if found.better == "min":
                change = Interval(-change.estimate, -change.high, -change.low)
            told = signed(change.estimate) + _paired(found, policy)
            effect: Effect = verdict.quality_effect or "unclear"
            cells[policy] = Cell(text, told, _between(change, signed), effect)
    where = "validation" if found.on_validation else "training"
    return Column(f"{found.metric}, {where}", cells)


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
    return f"{ratio:.2f}" if 0.095 <= abs(ratio) < 99.5 else f"{ratio:,.3g}"


def _between(found: Interval, text: Callable[[float], str]) -> str:
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ""
    return f"{text(found.low)} to {text(found.high)}"


def _paired(found: Comparison, policy: str) -> str:
    seeds = [{r.seed for r in found.finished(p)} for p in (policy, found.reference)]
    return "" if seeds[0] == seeds[1] else " paired"


def word_of(found: Comparison, policy: str) -> str:
    """Returns the verdict on a policy in the words of the table."""
    if policy == found.reference:
        return "reference"
    return WORDS[found.verdicts[policy].answer]


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
    pairs = found.pairs(policy)
    if not pairs:
        return "Look at the errors of the runs, and measure again."
    if verdict.answer == "equivalent and faster":
        return f"Use it: {how_to_use(policy)}."
    if verdict.answer == "equivalent, not faster":
        if all(are_same(*pair) for pair in pairs):
            name = found.label(policy)
            return f"{name} costs nothing here, and pays on machines that can do more."
        return f"Stay with {reference}, unless it is memory or size that you need."
    return {
        "worse": f"Stay with {reference}, or keep the layers that lose it in float32 "
        "(keep_float32=).",
        "slower": f"Stay with {reference}.",
        "undecided": f"{verdict.needs[:1].upper()}{verdict.needs[1:]}.",
    }[verdict.answer]


def how_to_use(policy: str) -> str:
    """Returns the lines of code that turn a policy on."""
    variant = Variant.parse(policy)
    call = f"tfamp.enable({variant.policy!r})"
    if tasks.is_plan_file(variant.policy):
        # What was given is a plan itself; its file may be gone.
        call = "tfamp.enable(plan)"
    if variant.is_stock:
        call = f"keras.config.set_dtype_policy({variant.policy!r})"
    steps = [f"{call} before the model is built"]
    steps += ["compile(jit_compile=True)"] * variant.jit_compile
    return ", ".join(steps)


def reference_sentence(found: Comparison) -> str:
    """Returns which policy the others are held against, and why that one."""
    plain = [policy for policy in found.policies if Variant.parse(policy).is_float32]
    name = found.label(found.reference)
    if found.reference not in plain:
        return f"Compared with {name}, the first policy, since none is float32."
    if len(plain) == 1:
        return f"Compared with {name}."
    return (
        f"Compared with {name}, the fastest of {len(plain)} ways to train in float32; "
        "a gain over a slower one would be none."
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
    """Returns a row for each policy as text, and the verdict last."""
    shown = columns(found)
    lines = []
    for policy in (found.reference, *found.candidates):
        texts = []
        for column in shown:
            cell = column.cells[policy]
            between = f"({cell.interval})" if cell.interval else ""
            change = f"{cell.change} {cell.sign}".strip()
            texts.append("\n".join(filter(None, (cell.value, change, between))))
        name = f"{named(found, policy)}\n{word_of(found, policy)}"
        lines.append((name, *texts))
    right = {"justify": "right", "overflow": "fold"}
    heads: dict[str, Any] = {"policy": console.FOLD}
    heads |= dict.fromkeys((column.heading for column in shown), right)
    others = [p for p in found.candidates if p != found.best]
    sentences = [
        LEGEND.format(found.label(found.reference)),
        reference_sentence(found),
        failures(found),
        *(policy_sentence(found, policy) for policy in others),
        advice(found, found.best),
        # Last, where the eye ends up.
        f"Verdict: {policy_sentence(found, found.best)}",
    ]
    text = console.table(
        heads, lines, title=found.title, box=None, padding=(0, 2, 1, 0)
    )
    return console.text_of(text, *filter(None, sentences))
