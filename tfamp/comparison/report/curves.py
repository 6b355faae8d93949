"""Plots over time: loss by step, metric by epoch, loss scale by step."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report import drawing, rows
from tfamp.comparison.report.drawing import Look, Plot
from tfamp.records.units import join_words

_HEIGHT, _BOTTOM = 214.0, 36.0
# Between the lines of labels beside curves that end close to one another.
_LABEL_STEP = 13.0
# Runs named in a note before it says how many more there are.
_MAX_NAMED = 4
# Up to so many points each has a dot.
_MAX_DOTS = 12

Series = Sequence[tuple[float, float]]
_NONE = (math.nan, math.nan, math.nan)


def loss_plot(evidence: Evidence, looks: Sequence[Look]) -> Plot | None:
    """Returns the plot of the training loss, None where no run has losses."""
    runs: dict[Look, list[Series]] = {
        look: [run.losses for run in evidence.finished(look.policy)] for look in looks
    }
    return _curves(evidence, runs, "loss", "Training loss", "step")


def metric_plot(evidence: Evidence, looks: Sequence[Look]) -> Plot | None:
    """Returns the plot of the metric by epoch, None where no run has it."""
    runs: dict[Look, list[Series]] = {
        look: [
            tuple(enumerate(rows.history_of(evidence, run), 1))
            for run in evidence.finished(look.policy)
        ]
        for look in looks
    }
    where = "Validation" if evidence.on_validation else "Training"
    title, may_be_log = f"{where} {evidence.metric}", evidence.better == "min"
    return _curves(evidence, runs, "metric", title, "epoch", may_be_log=may_be_log)


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
    axes = drawing.axes_of(_HEIGHT, _BOTTOM)
    ends: dict[Look, tuple[float, float]] = {}
    counts: dict[Look, list[str]] = {}
    for look, run in scaled:
        steps, scales = (list(each) for each in zip(*run.loss_scales, strict=True))
        falls = [i for i in range(1, len(scales)) if scales[i] < scales[i - 1]]
        ends[look] = max(run.num_steps, steps[-1]), scales[-1]
        whole = [*steps, ends[look][0]], [*scales, scales[-1]]
        axes.step(*whole, where="post", linewidth=1.3, **look.line)
        at = [steps[i] for i in falls], [scales[i] for i in falls]
        axes.plot(*at, "o", color=look.colour, markersize=5)
        counts.setdefault(look, []).append(str(run.skipped_steps))
    low, high = (math.log2(end) for end in axes.yaxis.get_data_interval())
    powers = range(math.floor(low) - 1, math.ceil(high) + 2)
    powers = powers[:: math.ceil(len(powers) / 7)]
    axes.set_yscale("log", base=2)
    axes.set_ylim(2.0 ** powers[0], 2.0 ** (math.ceil(high) + 1))
    axes.set_yticks([2.0**n for n in powers], [f"$2^{{{n}}}$" for n in powers])
    axes.minorticks_off()
    each = [f"{look.name} {', '.join(numbers)}" for look, numbers in counts.items()]
    skipped = f"Skipped steps by seed: {'; '.join(each)}."
    lead = "A line for each run, a dot where the scale fell because a step was skipped."
    _name_curves(axes, ends, "step")
    summary = f"Loss scale by step. {skipped}"
    return drawing.plot_of(axes, "scale", "Loss scale", lead, summary, (skipped,))


def curve(series: Sequence[Series]) -> np.ndarray:
    """Returns what runs come to that were measured at the same places.

    Shape (places, 4): the place, and median, least and largest of the runs that are
    finite there; NaN where none is.
    """
    at: dict[float, list[float]] = {}
    for place, value in (point for run in series for point in run):
        known = at.setdefault(place, [])
        known += [value] if math.isfinite(value) else []
    points = [
        (x, np.median(values), min(values), max(values)) if values else (x,) + _NONE
        for x, values in sorted(at.items())
    ]
    return np.array(points, np.float64).reshape(-1, 4)


def _curves(
    evidence: Evidence,
    runs: dict[Look, list[Series]],
    key: str,
    title: str,
    place: str,
    *,
    may_be_log: bool = True,
) -> Plot | None:
    axes = drawing.axes_of(_HEIGHT, _BOTTOM)
    ends = {}
    for look, series in runs.items():
        x, middle, low, high = curve(series).T
        if not (known := np.flatnonzero(np.isfinite(middle))).size:
            continue
        ends[look] = float(x[known[-1]]), float(middle[known[-1]])
        axes.fill_between(x, low, high, color=look.colour, alpha=0.17, linewidth=0)
        dots = {"marker": "o", "markersize": 5, "markeredgecolor": drawing.CARD}
        how: dict[str, Any] = {**look.line, **(dots if len(x) <= _MAX_DOTS else {})}
        # The reference is seen beneath others that lie upon it.
        axes.plot(x, middle, linewidth=3 if look.is_reference else 1.8, **how)
    if not ends:
        return None
    drawing.set_ticks(axes.yaxis, "", may_be_log=may_be_log)
    last = [f"{look.name} ends at {value:.4g}" for look, (_, value) in ends.items()]
    several = max(len(runs[look]) for look in ends) > 1
    middle = "median; band: least to largest of the seeds" if several else "one seed"
    logarithmic = " Logarithmic." if axes.get_yscale() == "log" else ""
    lead = f"By {place}, {middle}.{logarithmic}"
    summary = f"{title} by {place}, median over seeds: {join_words(last)}."
    _name_curves(axes, ends, place)
    notes = _not_finite(evidence, runs, place)
    return drawing.plot_of(axes, key, title, lead, summary, notes)


def _name_curves(axes: Any, ends: dict[Look, tuple[float, float]], place: str) -> None:
    """Writes names beside the ends of the curves, over an axis of places."""
    axes.set_xmargin(0)
    drawing.set_ticks(axes.xaxis, place, whole=True)
    axes.tick_params(axis="y", length=0)
    # "$2^{15}$" is as wide as three letters.
    ticks = [label.get_text().strip("${}") for label in axes.get_yticklabels()]
    ticks = [text.replace("^{", "") for text in ticks]
    names = drawing.room([look.short for look in ends])
    drawing.set_sides(axes, 8 + drawing.room(ticks), names + 16)
    at = {look: axes.transData.transform(end) for look, end in ends.items()}
    # Of those that end together the first is the upper one.
    ordered = sorted(reversed(at), key=lambda look: at[look][1])
    heights = _apart([at[look][1] for look in ordered])
    for look, y in zip(ordered, heights, strict=True):
        (x0, y0), x = at[look], drawing.WIDTH - names
        # Without a transform, coordinates are points of the figure.
        axes.plot([x0 + 2, x - 3], [y0, y], transform=None, linewidth=1.5, **look.line)
        drawing.write(axes, x, _HEIGHT - y, look.short)


def _apart(heights: Sequence[float]) -> list[float]:
    """Returns heights of labels, from below, that do not cover one another."""
    places: list[float] = []
    for y in heights:
        places.append(max(y, places[-1] + _LABEL_STEP if places else _BOTTOM))
    # Too many at the upper edge push one another down again.
    limit = _HEIGHT - drawing.TOP
    for index in reversed(range(len(places))):
        places[index] = min(places[index], limit)
        limit = places[index] - _LABEL_STEP
    return places


def _not_finite(
    evidence: Evidence, runs: dict[Look, list[Series]], place: str
) -> tuple[str, ...]:
    """Returns a sentence on the runs whose values are not finite, if there are any."""
    found = []
    for look, each in runs.items():
        finished = evidence.finished(look.policy)
        for run, series in zip(finished, each, strict=True):
            first = next((x for x, y in series if not math.isfinite(y)), None)
            if first is not None:
                found.append(f"{look.name} with seed {run.seed} at {place} {first:g}")
    if not found:
        return ()
    rest = len(found) - _MAX_NAMED
    named = found[:_MAX_NAMED] + ([f"{rest} more runs"] if rest > 0 else [])
    return (f"Left out where it is not a finite number, first {join_words(named)}.",)
