"""The figures of a comparison, a row a policy, and what they come to in sentences."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfamp.comparison.judgement import are_same
from tfamp.records import console, units
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


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# Name -> its heading and how it is written; the last two have no ratio.
_MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "examples_per_second": ("training (examples/s)", _number),
    "training_bytes": ("peak memory", units.format_bytes),
    "device_bytes": ("peak GPU memory", units.format_bytes),
    "energy_joules": ("energy (J)", _number),
    "step_seconds": ("step", units.format_seconds),
    "first_step_seconds": ("first step", units.format_seconds),
    "skipped_steps": ("skipped steps", _number),
    "num_nonfinite_weights": ("NaN in weights", _number),
}
_COUNTS = ("skipped_steps", "num_nonfinite_weights")


def value_of(run: Run, measure: str) -> float | None:
    """Returns a figure of a run, None where it was not measured."""
    if measure.startswith("latency_"):
        _, part, _, size = measure.split("_")
        return getattr(run.latency(int(size)), f"{part}_seconds", None)
    if measure == "device_bytes":
        return getattr(run.memory, measure, None)
    if measure == "training_bytes":
        peak = getattr(run.memory, measure, None)
        # Above the some 500 MiB that a process starts with.
        return peak and float(max(peak - run.memory.start_bytes, 0))  # type: ignore[union-attr]
    value: float | None = getattr(run, measure)
    return value


def measures_of(runs: Sequence[Run]) -> dict[str, tuple[str, Callable[[float], str]]]:
    """Returns heading and format of each measure that a finished run has, by name."""
    every = {**_MEASURES}
    for size in sorted({each.batch_size for run in runs for each in run.latencies}):
        for part in ("p50", "p90", "p99"):
            how = (f"latency, batch {size}", units.format_seconds)
            every[f"latency_{part}_batch_{size}"] = how
    finished = [run for run in runs if run.is_finished]
    return {
        name: how
        for name, how in every.items()
        if any(value_of(run, name) for run in finished)
    }


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


def columns(found: Comparison) -> dict[str, dict[str, Cell]]:
    """Returns heading -> policy -> cell: speed, quality, memory, latency, trouble.

    Quality is the mean over seeds and its difference from the reference's, all else the
    geometric mean and its ratio, so that a ratio is that of the figures beside it;
    where a run failed, and its pair is left out, it says "paired".
    """
    measures = measures_of(found.runs)
    latencies = [name for name in measures if name.startswith("latency_p50")][:1]
    names = ("training_bytes", "device_bytes", *latencies, "energy_joules", *_COUNTS)
    where = "validation" if found.on_validation else "training"
    table = {}
    for name in ("examples_per_second", "", *names):
        if not name:
            table[f"{found.metric}, {where}"] = {
                policy: _quality(found, policy) for policy in found.policies
            }
        elif name in measures:
            heading, text = measures[name]
            table[heading] = {
                p: _measured(found, p, name, text) for p in found.policies
            }
    return table


def _measured(
    found: Comparison, policy: str, name: str, text: Callable[[float], str]
) -> Cell:
    values = [value_of(run, name) for run in found.finished(policy)]
    known = [value for value in values if value is not None]
    if not known:
        return Cell("-")
    if name in _COUNTS or min(known) <= 0:
        return Cell(text(float(np.mean(known))))
    value = text(float(np.exp(np.mean(np.log(known)))))
    ratio = found.ratio(name, policy)
    if policy == found.reference or math.isnan(ratio.estimate):
        return Cell(value)
    effect = effect_of_ratio(ratio, more_is_better=name == "examples_per_second")
    if all(are_same(*pair) for pair in found.pairs(policy)):
        effect = "same"
    change = f"{_digits(ratio.estimate)}x{_paired(found, policy)}"
    return Cell(value, change, _between(ratio, _digits), effect)


def _quality(found: Comparison, policy: str) -> Cell:
    text = _mean_metric(found, found.finished(policy))
    verdict = found.verdicts.get(policy)
    if verdict is None or not math.isfinite(verdict.quality.estimate):
        return Cell(text)
    change = verdict.quality
    if found.better == "min":
        change = Interval(-change.estimate, -change.high, -change.low)
    told = _signed(change.estimate) + _paired(found, policy)
    effect: Effect = verdict.quality_effect or "unclear"
    return Cell(text, told, _between(change, _signed), effect)


def _mean_metric(found: Comparison, runs: Sequence[Run]) -> str:
    values = [run.final_metrics.get(found.metric, math.nan) for run in runs]
    if not np.isfinite(values).all():
        return "not a number"
    return _number(float(np.mean(values))) if values else "unknown"


def _signed(value: float) -> str:
    return f"{value:+,.2g}"


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
    return _WORDS[found.verdicts[policy].answer][0]


def sentences(found: Comparison, policy: str) -> tuple[str, str]:
    """Returns what a candidate comes to, with the figures, and what to do about it."""
    verdict, pairs = found.verdicts[policy], found.pairs(policy)
    name, reference = named(found, policy), found.label(found.reference)
    _, lead, advice = _WORDS[verdict.answer]
    if verdict.quality_effect == "same":  # it came to the reference itself
        advice = (
            f"{found.label(policy)} costs nothing here, and pays on machines that can "
            "do more."
        )
    words = {
        "name": name,
        "reference": reference,
        "good": "accurate" if "acc" in found.metric.lower() else "good",
        "how": _how_to_use(policy),
        "needs": f"{verdict.needs[:1].upper()}{verdict.needs[1:]}",
    }
    before, after = (
        _mean_metric(found, [pair[place] for pair in pairs]) for place in (0, 1)
    )
    seeds = "1 seed" if verdict.num_seeds == 1 else f"{verdict.num_seeds} seeds"
    return (
        f"{lead.format(**words)}: {found.metric} {after} against {before}, {seeds}; "
        f"{_shortened(verdict.reason)}.",
        advice.format(**words),
    )


def _how_to_use(policy: str) -> str:
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
    why = ""
    if found.reference not in plain:
        why = ", the first policy, since none is float32"
    elif len(plain) > 1:
        why = f", the fastest of {len(plain)} ways to train in float32"
    return f"Compared with {found.label(found.reference)}{why}."


def named(found: Comparison, policy: str) -> str:
    """Returns a policy with what it came to, where that is another name."""
    name, runs = found.label(policy), found.finished(policy)
    came_to = runs[0].resolved_policy if runs else ""
    return name if came_to in name else f"{name} ({came_to})"


def _shortened(error: str) -> str:
    """Returns the first line of an error, cut."""
    first = next((line for line in error.strip().splitlines() if line), "no error text")
    first = first.rstrip(".")
    return first if len(first) <= _MAX_ERROR else f"{first[: _MAX_ERROR - 3]}..."


def table(found: Comparison) -> str:
    """Returns a row for each policy as text, and the verdict last."""
    shown, lines = columns(found), []
    for policy in (found.reference, *found.candidates):
        texts = []
        for cells in shown.values():
            cell = cells[policy]
            between = f"({cell.interval})" if cell.interval else ""
            change = f"{cell.change} {cell.sign}".strip()
            texts.append("\n".join(filter(None, (cell.value, change, between))))
        name = f"{named(found, policy)}\n{word_of(found, policy)}"
        lines.append((name, *texts))
    right = {"justify": "right", "overflow": "fold"}
    heads: dict[str, Any] = {"policy": console.FOLD, **dict.fromkeys(shown, right)}
    number = sum(not run.is_finished for run in found.runs)
    sentence, advice = sentences(found, found.best)
    told = [
        LEGEND.format(found.label(found.reference)),
        reference_sentence(found),
        f"{number} of {len(found.runs)} runs failed." if number else "",
        *(sentences(found, p)[0] for p in found.candidates if p != found.best),
        advice,
        f"Verdict: {sentence}",  # last, where the eye ends up
    ]
    text = console.table(
        heads, lines, title=found.title, box=None, padding=(0, 2, 1, 0)
    )
    return console.text_of(text, *filter(None, told))
