"""Plots over time: loss by step, metric by epoch, loss scale by step."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tfamp._units import join_words
from tfamp.evidence import Evidence, Run
from tfamp.report import palette, rows, scales, svg
from tfamp.report.palette import Look
from tfamp.report.svg import Plot

_HEIGHT, _TOP, _BOTTOM = 214.0, 10.0, 38.0
# Between the lines of labels beside curves that end close to one another.
_LABEL_STEP = 13.0
# Runs named in a note before it says how many more there are.
_MAX_NAMED = 4

Series = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Runs of a policy at each place: their middle and their ends.

    Args:
        look: Of the policy.
        points: Place, median, least and largest of the runs that are finite there;
            NaN where none is.
        num_runs: How many runs there are.
    """

    look: Look
    points: tuple[tuple[float, float, float, float], ...]
    num_runs: int

    @classmethod
    def of(cls, look: Look, series: Sequence[Series]) -> "Curve":
        """Returns the curve through runs that were measured at the same places."""
        at: dict[float, list[float]] = {}
        for run in series:
            for place, value in run:
                at.setdefault(place, []).append(value)
        points = []
        for place in sorted(at):
            known = [value for value in at[place] if math.isfinite(value)]
            low, high = min(known, default=math.nan), max(known, default=math.nan)
            middle = float(np.median(known)) if known else math.nan
            points.append((place, middle, low, high))
        return cls(look, tuple(points), len(series))

    @property
    def last(self) -> tuple[float, float]:
        """The last place with a value, and it; NaN where there is none."""
        known = [(x, y) for x, y, _, _ in self.points if math.isfinite(y)]
        return known[-1] if known else (math.nan, math.nan)


def loss_plot(evidence: Evidence, looks: Sequence[Look]) -> Plot | None:
    """Returns the plot of the training loss, None where no run has losses."""
    runs: dict[str, list[Series]] = {
        look.policy: [run.losses for run in evidence.finished(look.policy)]
        for look in looks
    }
    return _curves(
        evidence,
        looks,
        runs,
        key="loss",
        title="Training loss",
        place="step",
        may_be_log=True,
    )


def metric_plot(evidence: Evidence, looks: Sequence[Look]) -> Plot | None:
    """Returns the plot of the metric by epoch, None where no run has it."""
    runs: dict[str, list[Series]] = {
        look.policy: [
            tuple(enumerate(rows.history_of(evidence, run), 1))
            for run in evidence.finished(look.policy)
        ]
        for look in looks
    }
    where = "Validation" if evidence.on_validation else "Training"
    return _curves(
        evidence,
        looks,
        runs,
        key="metric",
        title=f"{where} {evidence.metric}",
        place="epoch",
        may_be_log=evidence.better == "min",
    )


def scale_plot(evidence: Evidence, looks: Sequence[Look]) -> Plot | None:
    """Returns the plot of the loss scale, None where no run scales its loss."""
    scaled = [
        (look, run)
        for look in looks
        for run in evidence.finished(look.policy)
        if any(value > 0 and math.isfinite(value) for _, value in run.loss_scales)
    ]
    if not scaled:
        return None
    values = [v for _, r in scaled for _, v in r.loss_scales if v > 0 and v < math.inf]
    shown = tuple(dict.fromkeys(look for look, _ in scaled))
    first = math.floor(math.log2(min(values))) - 1
    last = math.ceil(math.log2(max(values))) + 1
    stride = math.ceil((last - first) / 6)
    ticks = [
        (2.0**power, f"2^{power}".replace("-", "−"))
        for power in range(first, last + 1, stride)
    ]
    left, right = 30.0, svg.WIDTH - palette.room(shown) - 16
    upright = scales.Scale(2.0**first, 2.0**last, _HEIGHT - _BOTTOM, _TOP, is_log=True)
    end = max(max(run.num_steps, run.loss_scales[-1][0]) for _, run in scaled)
    across = scales.scale([0, end], left, right, whole=True)
    parts = [_frame(across, upright, ticks, "step")]
    labels = []
    for look, run in scaled:
        steps, falls = _stairs(look, run, end, across, upright)
        parts += [svg.path(steps, f"line thin {look.style}"), *falls]
        labels.append((look, steps[-1][1]))
    ends = {look: y for look, y in labels}
    parts.append(_labels(list(ends.items()), right))
    skipped = []
    for look in shown:
        counts = [str(run.skipped_steps) for other, run in scaled if other == look]
        skipped.append(f"{look.name} {', '.join(counts)}")
    summary = f"Loss scale by step. Skipped steps by seed: {'; '.join(skipped)}."
    return Plot(
        "scale",
        "Loss scale",
        "A line for each run, a dot where the scale fell because a step was skipped.",
        summary,
        svg.drawing(_HEIGHT, summary, *parts),
        (f"Skipped steps by seed: {'; '.join(skipped)}.",),
    )


def _curves(
    evidence: Evidence,
    looks: Sequence[Look],
    runs: dict[str, list[Series]],
    *,
    key: str,
    title: str,
    place: str,
    may_be_log: bool,
) -> Plot | None:
    curves = [Curve.of(look, runs[look.policy]) for look in looks if runs[look.policy]]
    notes = _not_finite(evidence, looks, runs, place)
    shown = [curve for curve in curves if math.isfinite(curve.last[1])]
    if not shown:
        return None
    values = [value for curve in shown for point in curve.points for value in point[1:]]
    upright = scales.scale(values, _HEIGHT - _BOTTOM, _TOP, may_be_log=may_be_log)
    ticks = upright.ticks()
    left = 8 + svg.LETTER * max(len(label) for _, label in ticks)
    right = svg.WIDTH - palette.room(tuple(curve.look for curve in shown)) - 16
    places = [point[0] for curve in shown for point in curve.points]
    across = scales.scale(places, left, right, whole=True)
    parts = [_frame(across, upright, ticks, place)]
    for curve in shown:
        parts += _band(curve, across, upright)
    for curve in shown:
        parts += _line(curve, across, upright, place)
    ends = [(curve.look, upright(curve.last[1])) for curve in shown]
    parts.append(_labels(ends, right))
    last = [f"{curve.look.name} ends at {curve.last[1]:.4g}" for curve in shown]
    summary = f"{title} by {place}, median over seeds: {join_words(last)}."
    several = max(curve.num_runs for curve in shown) > 1
    band = "; band: least to largest of the seeds" if several else ""
    lead = f"By {place}, median{band}." if several else f"By {place}, one seed."
    if upright.is_log:
        lead += " Logarithmic."
    drawing = svg.drawing(_HEIGHT, summary, *parts)
    return Plot(key, title, lead, summary, drawing, notes)


def _frame(
    across: scales.Scale,
    upright: scales.Scale,
    ticks: Sequence[tuple[float, str]],
    place: str,
) -> str:
    """Returns the lines and figures of both axes."""
    base, parts = _HEIGHT - _BOTTOM, []
    for value, label in ticks:
        y = upright(value)
        parts.append(svg.line(across.start, y, across.end, y, "grid"))
        parts.append(svg.text(across.start - 6, y + 3.5, label, anchor="end"))
    parts.append(svg.line(across.start, base, across.end, base, "axis"))
    for value, label in across.ticks():
        x = across(value)
        parts.append(svg.line(x, base, x, base + 4, "axis"))
        parts.append(svg.text(x, base + 15, label, anchor="middle"))
    middle = (across.start + across.end) / 2
    parts.append(svg.text(middle, base + 31, place, anchor="middle", class_="name"))
    return "".join(parts)


def _band(curve: Curve, across: scales.Scale, upright: scales.Scale) -> list[str]:
    """Returns the area between least and largest, one for each piece without gap."""
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for x, _, low, high in curve.points:
        if math.isfinite(low):
            pieces[-1].append((across(x), upright(low), upright(high)))
        elif pieces[-1]:
            pieces.append([])
    found = []
    for piece in pieces:
        if len(piece) > 1 and any(low != high for _, low, high in piece):
            there = [(x, high) for x, _, high in piece]
            back = [(x, low) for x, low, _ in reversed(piece)]
            style = f"band {curve.look.style}"
            found.append(svg.path(there + back, style, close=True))
    return found


def _line(
    curve: Curve, across: scales.Scale, upright: scales.Scale, place: str
) -> list[str]:
    """Returns the middle line, with dots where points are few enough to count."""
    points = [(across(x), upright(y)) for x, y, _, _ in curve.points]
    found = [svg.path(points, f"line {curve.look.style}")]
    if len(points) <= 12:
        for (x, y), (at, value, _, _) in zip(points, curve.points, strict=True):
            if math.isfinite(y):
                tip = f"{curve.look.name}, {place} {at:g}: {value:.4g}"
                found.append(svg.dot(x, y, 2.6, f"dot {curve.look.style}", tip))
    return found


def _labels(ends: Sequence[tuple[Look, float]], right: float) -> str:
    """Returns names beside the ends of curves, moved apart where they meet."""
    ordered = sorted(ends, key=lambda pair: pair[1])
    bottom = _HEIGHT - _BOTTOM
    places: list[float] = []
    for _, y in ordered:
        lowest = places[-1] + _LABEL_STEP if places else _TOP
        places.append(max(y, lowest))
    # Too many at the lower edge push one another up again.
    limit = bottom
    for index in range(len(places) - 1, -1, -1):
        places[index] = min(places[index], limit)
        limit = places[index] - _LABEL_STEP
    parts = []
    for (look, y), place in zip(ordered, places, strict=True):
        parts.append(svg.line(right + 2, y, right + 10, place, f"leader {look.style}"))
        parts.append(svg.text(right + 13, place + 3.5, look.short, class_="label"))
    return "".join(parts)


def _stairs(
    look: Look, run: Run, end: float, across: scales.Scale, upright: scales.Scale
) -> tuple[list[tuple[float, float]], list[str]]:
    """Returns the steps of a loss scale, and a dot for each fall."""
    points: list[tuple[float, float]] = []
    falls, before = [], math.nan
    for step, value in run.loss_scales:
        x, y = across(step), upright(value)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
        if value < before:
            tip = f"{look.name}, seed {run.seed}, step {step}: {before:g} to {value:g}"
            falls.append(svg.dot(x, y, 2.6, f"dot {look.style}", tip))
        before = value
    points.append(
        (across(max(end if not run.num_steps else run.num_steps, 0)), points[-1][1])
    )
    return points, falls


def _not_finite(
    evidence: Evidence,
    looks: Sequence[Look],
    runs: dict[str, list[Series]],
    place: str,
) -> tuple[str, ...]:
    """Returns a sentence on the runs whose values are not finite, if there are any."""
    found = []
    for look in looks:
        finished = evidence.finished(look.policy)
        for run, series in zip(finished, runs[look.policy], strict=True):
            first = next((x for x, y in series if not math.isfinite(y)), None)
            if first is not None:
                found.append(f"{look.name} with seed {run.seed} at {place} {first:g}")
    if not found:
        return ()
    rest = len(found) - _MAX_NAMED
    named = found[:_MAX_NAMED] + ([f"{rest} more runs"] if rest > 0 else [])
    return (f"Left out where it is not a finite number, first {join_words(named)}.",)
