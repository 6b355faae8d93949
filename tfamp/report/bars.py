"""Plots of speed, latency, memory and operations, and what the verdict rests on."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tfamp._units import join_words
from tfamp.evidence import Evidence, Interval, Run
from tfamp.evidence.intervals import interval_of_ratios
from tfamp.report import figures, rows, strips
from tfamp.report.figures import Format, format_for
from tfamp.report.palette import Look
from tfamp.report.strips import Group, Line
from tfamp.report.svg import Plot, dot, line

Looks = Sequence[Look]
_UNKNOWN = Interval(math.nan, math.nan, math.nan)


def speed_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of examples/s of each run, with intervals."""
    group, form = _of_runs(evidence, looks, "", lambda run: run.examples_per_second)
    if not group.lines:
        return None
    ends = [f"{entry.label} {entry.value}" for entry in group.lines]
    summary = f"Training examples per second: {join_words(ends)}."
    return Plot(
        "speed",
        "Training speed",
        "A dot for each run; bar: where the mean may lie, 5 % error on each side.",
        summary,
        strips.chart([group], unit=form.unit, summary=summary),
    )


def step_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of how step times scatter inside each run."""
    steps = {
        look: [run for run in evidence.finished(look.policy) if run.step is not None]
        for look in looks
    }
    every = [r.step for runs in steps.values() for r in runs if r.step is not None]
    if not every:
        return None
    form = format_for("seconds", [step.median for step in every])
    found = []
    for look, runs in steps.items():
        if runs:
            found.append(_step_line(look, runs, form))
    ends = [f"{entry.label} {entry.value} {form.unit}" for entry in found]
    summary = f"Time of a training step, median of runs: {join_words(ends)}."
    return Plot(
        "step",
        "Step time",
        "For each run the median, and the half of its steps around it.",
        summary,
        strips.chart([Group("", tuple(found))], unit=form.unit, summary=summary),
    )


def _step_line(look: Look, runs: Sequence[Run], form: Format) -> Line:
    spreads = [(run.seed, run.step) for run in runs if run.step is not None]
    medians = [step.median for _, step in spreads]

    def draw(across: Callable[[float], float], y: float) -> list[str]:
        parts = []
        for (seed, step), offset in zip(
            spreads, strips.offsets(len(spreads), 14.0), strict=True
        ):
            low, middle, high = (
                across(v / form.factor) for v in (step.low, step.median, step.high)
            )
            here = y + offset
            tip = (
                f"{look.name}, seed {seed}: {form(step.median)} "
                f"({form(step.low)} to {form(step.high)}) {form.unit}"
            )
            parts.append(line(low, here, high, here, f"range {look.style}"))
            parts.append(dot(middle, here, 2.2, f"dot {look.style}", tip))
        return parts

    held = [v / form.factor for _, s in spreads for v in (s.low, s.high)]
    value = form(float(np.median(medians)))
    return Line(look.short, look.style, value, tuple(held), draw)


def latency_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of p50, p90 and p99 of a call by batch size."""
    names = ("p50_seconds", "p90_seconds", "p99_seconds")
    sizes = sorted({e.batch_size for r in evidence.runs for e in r.latencies})
    found: dict[int, dict[Look, list[float]]] = {}
    for size in sizes:
        for look in looks:
            each = [run.latency(size) for run in evidence.finished(look.policy)]
            known = [entry for entry in each if entry is not None]
            if known:
                middles = [
                    float(np.median([getattr(e, n) for e in known])) for n in names
                ]
                found.setdefault(size, {})[look] = middles
    if not found:
        return None
    every = [v for by in found.values() for middles in by.values() for v in middles]
    form = format_for("seconds", every)
    groups = [
        Group(
            f"batch {size}",
            tuple(
                _latency_line(
                    look, middles, figures.finer(form, [m[0] for m in by.values()])
                )
                for look, middles in by.items()
            ),
        )
        for size, by in found.items()
    ]
    ends = [
        f"batch {size}: "
        + ", ".join(f"{look.name} {form(m[0])}" for look, m in by.items())
        for size, by in found.items()
    ]
    summary = f"Median time of a call in {form.unit}. {'; '.join(ends)}."
    return Plot(
        "latency",
        "Inference latency",
        "Of a call, by batch size: ● p50 (at the right), | p90, ○ p99.",
        summary,
        strips.chart(groups, unit=form.unit, summary=summary, may_be_log=True),
    )


def _latency_line(look: Look, seconds: Sequence[float], form: Format) -> Line:
    values = [value / form.factor for value in seconds]
    tip = ", ".join(
        f"{name} {form.with_unit(value)}"
        for name, value in zip(("p50", "p90", "p99"), seconds, strict=True)
    )

    def draw(across: Callable[[float], float], y: float) -> list[str]:
        p50, p90, p99 = map(across, values)
        tipped = f"{look.name}: {tip}"
        return [
            line(p50, y, p99, y, f"range {look.style}"),
            line(p90, y - 5, p90, y + 5, f"middle {look.style}"),
            dot(p99, y, 3.2, f"ring {look.style}", tipped),
            dot(p50, y, 3.6, f"dot {look.style}", tipped),
        ]

    return Line(look.short, look.style, form(seconds[0]), tuple(values), draw)


def memory_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of the peaks of memory, None where none was measured."""

    def of(name: str, *, above_start: bool) -> Callable[[Run], float | None]:
        def value(run: Run) -> float | None:
            found = None if run.memory is None else getattr(run.memory, name)
            if found is None or run.memory is None or not above_start:
                return found
            return float(max(found - run.memory.start_bytes, 0))

        return value

    kinds = (
        ("training, above the start", of("training_bytes", above_start=True)),
        ("inference, above the start", of("inference_bytes", above_start=True)),
        ("GPU, given out in training", of("device_bytes", above_start=False)),
        ("GPU, in use by all programs", of("device_used_bytes", above_start=False)),
    )
    values = [of(run) for _, of in kinds for run in evidence.runs if run.is_finished]
    form = format_for("bytes", values)
    groups = [_of_runs(evidence, looks, name, of, form)[0] for name, of in kinds]
    groups = [group for group in groups if group.lines]
    if not groups:
        return None
    ends = [
        f"{group.heading}: " + ", ".join(f"{e.label} {e.value}" for e in group.lines)
        for group in groups
    ]
    summary = f"Peak memory in {form.unit}. {'; '.join(ends)}."
    return Plot(
        "memory",
        "Peak memory",
        "A dot for each run; bar: where the mean may lie.",
        summary,
        strips.chart(groups, unit=form.unit, summary=summary),
    )


def _of_runs(
    evidence: Evidence,
    looks: Looks,
    heading: str,
    of: Callable[[Run], float | None],
    form: Format | None = None,
) -> tuple[Group, Format]:
    """Returns the lines of a measure above 0, a dot for each run."""
    values: dict[Look, list[tuple[int, float]]] = {}
    for look in looks:
        for run in evidence.finished(look.policy):
            value = of(run)
            if value and math.isfinite(value):
                values.setdefault(look, []).append((run.seed, value))
    if form is None:
        form = format_for("per second", [v for e in values.values() for _, v in e])
    lines = []
    for look, each in values.items():
        found = interval_of_ratios([value / form.factor for _, value in each])
        dots = [
            (f"{look.name}, seed {seed}: {form.with_unit(value)}", value / form.factor)
            for seed, value in each
        ]
        middle = form(float(np.median([value for _, value in each])))
        lines.append(strips.runs_line(look.short, look.style, middle, dots, found))
    return Group(heading, tuple(lines)), form


def quality_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of the differences that the verdict on quality rests on."""
    tolerance = rows.metric_tolerance(evidence)
    form = figures.metric_format(tolerance)
    sign = 1 if evidence.better == "max" else -1
    lines = []
    for look in looks[1:]:
        dots = []
        for before, after in evidence.pairs(look.policy):
            value = sign * (rows.final(evidence, after) - rows.final(evidence, before))
            tip = f"{look.name}, seed {after.seed}: {form(value, sign=True)}"
            dots.append((tip, value))
        found = rows.quality(evidence, look.policy)
        if any(math.isfinite(value) for _, value in dots):
            text = form(found.estimate, sign=True)
            lines.append(
                strips.runs_line(look.short, look.style, text, dots, found, stem=False)
            )
    if not lines:
        return None
    ends = [f"{entry.label} {entry.value}" for entry in lines]
    allowed = figures.metric_format(tolerance, digits=1)(tolerance)
    title = f"{evidence.metric.capitalize()} against {evidence.reference}"
    summary = (
        f"Difference of {evidence.metric} from {evidence.reference}, above 0 where "
        f"better: {join_words(ends)}; a loss of {allowed} counts as none."
    )
    return Plot(
        "quality",
        title,
        f"A dot for each pair of runs; right of 0 is better. Shaded: a loss of up to "
        f"{allowed}, which counts as none.",
        summary,
        strips.chart(
            [Group("", tuple(lines))],
            unit="difference",
            summary=summary,
            from_zero=False,
            mark=0.0,
            zone=(-tolerance, 0.0),
        ),
    )
