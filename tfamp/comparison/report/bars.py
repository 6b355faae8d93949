"""Plots of speed, latency and memory, and what the verdict rests on.

Each has a line for each policy: its name at the left, its figure at the right.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.figures import Format, format_for, memory_of
from tfamp.comparison.report import drawing, rows
from tfamp.comparison.report.drawing import Look, Plot
from tfamp.records.units import join_words
from tfamp.trials.run_records import Run
from tfamp.trials.statistics import Interval, interval_of_ratios

Looks = Sequence[Look]
_ROW, _HEADING, _BOTTOM = 24.0, 22.0, 34.0
# An axis leaves out what of an interval lies this far beyond the values.
_REACH = 0.3


class Line(NamedTuple):
    """One line of a plot: label at the left, value at the right, marks between.

    `draw` is given the axes and the line's height in points.
    """

    label: str
    value: str
    draw: Callable[[Any, float], None]


# Lines under a heading, "" for none.
Group = tuple[str, Sequence[Line]]


def speed_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of examples/s of each run, with intervals."""
    each = _values(evidence, looks, lambda run: run.examples_per_second)
    form = format_for("per second", [v for known in each.values() for v in known])
    lead = "A dot for each run; bar: where the mean may lie, 5 % error on each side."
    group = ("", _runs_lines(each, form))
    return plot_lines("speed", "Training speed", lead, [group], form.unit)


def step_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of how step times scatter inside each run."""
    runs = {
        look: np.array([(s.low, s.median, s.high) for s in found])
        for look in looks
        if (found := [r.step for r in evidence.finished(look.policy) if r.step])
    }
    form = format_for("seconds", [s for each in runs.values() for s in each[:, 1]])

    def line(look: Look, seconds: np.ndarray) -> Line:
        low, medians, high = seconds.T / form.factor

        def draw(axes: Any, y: float) -> None:
            heights = y + _offsets(len(medians), 14.0)
            axes.hlines(heights, low, high, colors=look.colour, linewidths=2)
            _dots(axes, medians, heights, look)

        return Line(look.short, form(float(np.median(seconds[:, 1]))), draw)

    lead = "For each run the median, and the half of its steps around it."
    group = ("", [line(look, each) for look, each in runs.items()])
    return plot_lines("step", "Step time", lead, [group], form.unit)


def latency_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of p50, p90 and p99 of a call by batch size."""
    found: dict[int, dict[Look, np.ndarray]] = {}
    for size in sorted({e.batch_size for r in evidence.runs for e in r.latencies}):
        for look in looks:
            each = [run.latency(size) for run in evidence.finished(look.policy)]
            known = [(e.p50_seconds, e.p90_seconds, e.p99_seconds) for e in each if e]
            if known:
                found.setdefault(size, {})[look] = np.median(known, axis=0)
    every = [seconds for by in found.values() for seconds in by.values()]
    form = format_for("seconds", np.ravel(every))

    def line(look: Look, seconds: np.ndarray, fine: Format) -> Line:
        p50, p90, p99 = seconds / form.factor

        def draw(axes: Any, y: float) -> None:
            axes.hlines(y, p50, p99, colors=look.colour, linewidths=2)
            axes.vlines(p90, y - 5, y + 5, colors=look.colour, linewidths=2)
            how = {"markeredgecolor": look.colour, "markersize": 6}
            axes.plot(p99, y, "o", color=drawing.CARD, markeredgewidth=1.5, **how)
            axes.plot(p50, y, "o", color=look.colour, **how)

        return Line(look.short, fine(seconds[0]), draw)

    groups = []
    for size, by in found.items():
        fine = figures.finer(form, [seconds[0] for seconds in by.values()])
        lines = [line(look, seconds, fine) for look, seconds in by.items()]
        groups.append((f"batch {size}", lines))
    lead = "Of a call, by batch size: ● p50 (at the right), | p90, ○ p99."
    title = "Inference latency"
    return plot_lines("latency", title, lead, groups, form.unit, may_be_log=True)


def memory_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of the peaks of memory, None where none was measured."""
    kinds = {
        "training, above the start": memory_of("training_bytes"),
        "inference, above the start": memory_of("inference_bytes"),
        "GPU, given out in training": memory_of("device_bytes"),
        "GPU, in use by all programs": memory_of("device_used_bytes"),
    }
    runs = [run for run in evidence.runs if run.is_finished]
    form = format_for("bytes", [of(run) for of in kinds.values() for run in runs])
    groups = [
        (heading, _runs_lines(_values(evidence, looks, of), form))
        for heading, of in kinds.items()
    ]
    lead = "A dot for each run; bar: where the mean may lie."
    return plot_lines("memory", "Peak memory", lead, groups, form.unit)


def quality_plot(evidence: Evidence, looks: Looks) -> Plot | None:
    """Returns the plot of the differences that the verdict on quality rests on."""
    tolerance = evidence.tolerance
    form = figures.metric_format(tolerance)
    sign = 1 if evidence.better == "max" else -1
    lines = []
    for look in looks[1:]:
        values = [
            sign * (rows.final(evidence, after) - rows.final(evidence, before))
            for before, after in evidence.pairs(look.policy)
        ]
        found = rows.quality(evidence, look.policy)
        if any(map(math.isfinite, values)):
            text = form(found.estimate, sign=True)
            lines.append(_runs_line(look, text, values, found, tolerance))
    allowed = figures.metric_format(tolerance, digits=1)(tolerance)
    return plot_lines(
        "quality",
        f"{evidence.metric.capitalize()} against {evidence.label(evidence.reference)}",
        "A dot for each pair of runs; right of 0 is better. Shaded: a loss of up to "
        f"{allowed}, which counts as none.",
        [("", lines)],
        "difference",
        tolerance=tolerance,
    )


def _values(
    evidence: Evidence, looks: Looks, of: Callable[[Run], float | None]
) -> dict[Look, list[float]]:
    """Returns a measure of each finished run, where it is above 0."""
    found = {}
    for look in looks:
        values = [of(run) for run in evidence.finished(look.policy)]
        found[look] = [v for v in values if v and math.isfinite(v)]
    return {look: known for look, known in found.items() if known}


def _runs_lines(values: dict[Look, list[float]], form: Format) -> list[Line]:
    """Returns a line for each policy: a dot for each run, a bar for their mean."""
    lines = []
    for look, each in values.items():
        shown = [value / form.factor for value in each]
        found = interval_of_ratios(shown)
        middle = form(found.estimate * form.factor)
        lines.append(_runs_line(look, middle, shown, found))
    return lines


def _runs_line(
    look: Look,
    value: str,
    values: Iterable[float],
    found: Interval,
    tolerance: float | None = None,
) -> Line:
    """Returns such a line; without a tolerance a thin line leads to it from 0."""
    known = [value for value in values if math.isfinite(value)]

    def draw(axes: Any, y: float) -> None:
        colour, is_known = look.colour, math.isfinite(found.estimate)
        if is_known and tolerance is None:
            axes.barh(y, found.estimate, 3, color=colour, alpha=0.5)
        # Whether it goes beyond the tolerance is seen.
        if ends := reachable(found, known, 1.5 * (tolerance or 0.0)):
            low, high = ends
            axes.barh(y, high - low, 12, left=low, color=colour, alpha=0.3)
            # An arrow where the interval goes on.
            if found.low < low:
                axes.plot(low, y, marker="<", color=colour, markersize=5)
            if found.high > high:
                axes.plot(high, y, marker=">", color=colour, markersize=5)
        if is_known:
            axes.vlines(found.estimate, y - 8, y + 8, colors=colour, linewidths=2)
        _dots(axes, known, y + _offsets(len(known)), look)

    return Line(look.short, value, draw)


def reachable(
    found: Interval, values: Sequence[float], least: float = 0.0
) -> tuple[float, ...]:
    """Returns the ends of an interval, cut where they would dwarf all else.

    They go at least `least` beyond the values it was taken from.
    """
    if not values or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ()
    room = max(least, _REACH * max(map(abs, values)))
    return max(found.low, min(values) - room), min(found.high, max(values) + room)


def _dots(axes: Any, values: Sequence[float], heights: np.ndarray, look: Look) -> None:
    how = {"markeredgecolor": drawing.CARD, "markeredgewidth": 0.7, "markersize": 5.9}
    axes.plot(values, heights, "o", color=look.colour, **how)


def _offsets(number: int, height: float = 9.0) -> np.ndarray:
    """Returns how far marks stand above or below a line so that all are seen."""
    step = min(3.0, height / max(number - 1, 1))
    return step * (np.arange(number) - (number - 1) / 2)


def plot_lines(
    key: str,
    title: str,
    lead: str,
    groups: Iterable[Group],
    unit: str,
    *,
    may_be_log: bool = False,
    tolerance: float | None = None,
) -> Plot | None:
    """Returns the plot of groups of lines over one axis, None without lines.

    `tolerance` shades what lies so far below 0; without it the axis starts at 0.
    """
    groups = [group for group in groups if group[1]]
    if not groups:
        return None
    lines = [line for _, group in groups for line in group]
    inner = _ROW * len(lines) + sum(_HEADING + 4 for heading, _ in groups if heading)
    axes = drawing.axes_of(inner + drawing.TOP + _BOTTOM, _BOTTOM)
    axes.set_ylim(inner, 0)
    y = 0.0
    for heading, group in groups:
        if heading:
            drawing.write(axes, 0, y + 16, heading, weight="bold")
            y += _HEADING
        for line in group:
            line.draw(axes, y + _ROW / 2)
            at = y + _ROW / 2 + drawing.TOP
            drawing.write(axes, 0, at, line.label)
            how = {"ha": "right", "weight": "bold"}
            drawing.write(axes, drawing.WIDTH, at, line.value, **how)
            y += _ROW
        y += 4 if heading else 0
    if tolerance is not None:
        axes.axvspan(-tolerance, 0, color=drawing.ZONE, linewidth=0, zorder=0)
        axes.axvline(0, color=drawing.INK, linewidth=1, zorder=1)
    from_zero = tolerance is None
    drawing.set_ticks(axes.xaxis, unit, from_zero=from_zero, may_be_log=may_be_log)
    axes.set_yticks([])
    axes.tick_params(length=0)
    left, right = [line.label for line in lines], [line.value for line in lines]
    drawing.set_sides(axes, 8 + drawing.room(left), 8 + drawing.room(right))
    ends = [
        f"{heading}{': ' if heading else ''}"
        + join_words([f"{line.label} {line.value}" for line in group])
        for heading, group in groups
    ]
    summary = f"{title} in {unit}: {'; '.join(ends)}."
    return drawing.plot_of(axes, key, title, lead, summary)
