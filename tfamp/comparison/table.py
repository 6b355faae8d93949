"""The figures of a comparison, a row a policy, and what they come to in sentences."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfamp.comparison.judgement import are_same
from tfamp.records import console
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
_UNITS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")),
    "J": ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")),
    "examples/s": ((1.0, "examples/s"),),
    "": ((1.0, ""),),
}


# Name -> label, unit and where a run has it; the last two have no ratio.
_MEASURES = {
    "examples_per_second": ("training", "examples/s", "examples_per_second"),
    "training_bytes": ("peak memory", "bytes", ""),
    "device_bytes": ("peak GPU memory", "bytes", "memory.device_bytes"),
    "energy_joules": ("energy", "J", "energy_joules"),
    "step_seconds": ("step", "s", "step_seconds"),
    "first_step_seconds": ("first step", "s", "first_step_seconds"),
    "skipped_steps": ("skipped steps", "", "skipped_steps"),
    "nonfinite": ("NaN in weights", "", "num_nonfinite_weights"),
}


def value_of(run: Run, measure: str) -> float | None:
    """Returns a figure of a run, None where it was not measured."""
    if measure.startswith("latency_"):
        _, part, _, size = measure.split("_")
        return getattr(run.latency(int(size)), f"{part}_seconds", None)
    if measure == "training_bytes":
        if run.memory is None or run.memory.training_bytes is None:
            return None
        # Above the some 500 MiB that a process starts with.
        return float(max(run.memory.training_bytes - run.memory.start_bytes, 0))
    found: Any = run
    for name in _MEASURES[measure][2].split("."):
        found = getattr(found, name, None)
    return found


def measures_of(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Returns label and unit of each measure that a finished run has, by name."""
    every = {name: (label, unit) for name, (label, unit, _) in _MEASURES.items()}
    for size in sorted({each.batch_size for run in runs for each in run.latencies}):
        for part in ("p50", "p90", "p99"):
            every[f"latency_{part}_batch_{size}"] = (f"latency, batch {size}", "s")
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
    measures, table = measures_of(found.runs), {}
    latencies = [name for name in measures if name.startswith("latency_p50")][:1]
    rest = ("training_bytes", "device_bytes", *latencies, "energy_joules")
    for name in ("examples_per_second", "", *rest, "skipped_steps", "nonfinite"):
        if not name:
            where = "validation" if found.on_validation else "training"
            table[f"{found.metric}, {where}"] = {
                policy: _quality(found, policy) for policy in found.policies
            }
        elif name in measures:
            label, unit = measures[name]
            means = {policy: _mean(found, policy, name) for policy in found.policies}
            unit, texts = scaled(unit, list(means.values()))
            table[f"{label} ({unit})" if unit else label] = {
                policy: _measured(found, policy, name, text)
                for policy, text in zip(means, texts, strict=True)
            }
    return table


def _mean(found: Comparison, policy: str, measure: str) -> float:
    """Returns the mean over a policy's runs, geometric where all are above 0."""
    values = [value_of(run, measure) for run in found.finished(policy)]
    known = [value for value in values if value is not None]
    if not known or min(known) <= 0:
        return float(np.mean(known)) if known else math.nan
    return float(np.exp(np.mean(np.log(known))))


def _measured(found: Comparison, policy: str, name: str, text: str) -> Cell:
    is_plain = name in ("skipped_steps", "nonfinite") or policy == found.reference
    ratio = found.ratio(name, policy)
    if is_plain or math.isnan(ratio.estimate):
        return Cell(text)
    more_is_better = name == "examples_per_second"
    effect = effect_of_ratio(ratio, more_is_better=more_is_better)
    if all(are_same(*pair) for pair in found.pairs(policy)):
        effect = "same"
    change = f"{_digits(ratio.estimate)}x{_paired(found, policy)}"
    return Cell(text, change, _between(ratio, _digits), effect)


def _quality(found: Comparison, policy: str) -> Cell:
    decimals = _decimals(found.tolerance)
    text, verdict = _mean_metric(found, found.finished(policy), decimals), None
    if policy != found.reference:
        verdict = found.verdicts[policy]
    if verdict is None or not math.isfinite(verdict.quality.estimate):
        return Cell(text)

    def signed(value: float) -> str:
        return f"{round(value, decimals) + 0.0:+,.{decimals}f}"

    change = verdict.quality
    if found.better == "min":
        change = Interval(-change.estimate, -change.high, -change.low)
    told = signed(change.estimate) + _paired(found, policy)
    effect: Effect = verdict.quality_effect or "unclear"
    return Cell(text, told, _between(change, signed), effect)


def _mean_metric(found: Comparison, runs: Sequence[Run], decimals: int) -> str:
    values = [run.final_metrics.get(found.metric, math.nan) for run in runs]
    if not np.isfinite(values).all():
        return "not a number"
    return f"{np.mean(values):,.{decimals}f}" if values else "-"


def _decimals(tolerance: float, digits: int = 2) -> int:
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
    return _WORDS[found.verdicts[policy].answer][0]


def sentences(found: Comparison, policy: str) -> tuple[str, str]:
    """Returns what a candidate comes to, with the figures, and what to do about it."""
    verdict, pairs = found.verdicts[policy], found.pairs(policy)
    name, reference = named(found, policy), found.label(found.reference)
    if not pairs:
        own = [run for run in found.runs if not run.is_finished]
        own = [run for run in own if run.policy in (policy, found.reference)]
        why = "no two runs have the same seed"
        if own:
            who = f"{found.label(own[0].policy)} with seed {own[0].seed}"
            why = f"{who} failed with {_shortened(own[0].error)}"
        return (
            f"Nothing is known of {name}: no seed finished both under it and under "
            f"{reference}; {why}.",
            "Look at the errors of the runs, and measure again.",
        )
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
    decimals = _decimals(found.tolerance, digits=1)
    before, after = (
        _mean_metric(found, runs, decimals) for runs in zip(*pairs, strict=True)
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
