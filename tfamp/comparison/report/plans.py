"""Plans that `tfamp.tune` made: how they were found, as sentences, rows and plots."""

import dataclasses
import math
from typing import Any

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence, TunedPlan
from tfamp.comparison.report import drawing
from tfamp.comparison.report.drawing import Plot
from tfamp.dtypes import plan_plot
from tfamp.records.units import format_seconds, join_words

_HEIGHT, _BOTTOM = 250.0, 36.0
# Letters that the names of layers have, smaller than those of policies.
_NAME_SIZE = 9.5
_LOOK = plan_plot.Look(
    half=drawing.COLOURS[1],
    float32=drawing.COLOURS[2],
    ink=drawing.INK,
    soft=drawing.SOFT,
    size=_NAME_SIZE,
)
# Layers in float32 that a line names.
_MOST_NAMED = 4
LAYER_COLUMNS = ("computes in", "error of outputs", "of gradients", "saves")
EVALUATION_COLUMNS = ("in float32", "worse by", "at most", "tolerance", "took")


Rows = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PlanSection:
    """What is told of one plan.

    `found` says what it came to, `cost` what the answer cost; `layers` has a row for
    each, its name and figures by `LAYER_COLUMNS`, those in float32 and those with the
    largest errors first; `evaluations` one by `EVALUATION_COLUMNS`, in order.
    """

    key: str
    label: str
    found: str
    cost: str
    layers: Rows
    evaluations: Rows
    plan: TunedPlan


def plan_sections(evidence: Evidence) -> tuple[PlanSection, ...]:
    """Returns a section for each compared plan that `tfamp.tune` made."""
    return tuple(
        PlanSection(
            f"plan-{number}",
            evidence.label(policy),
            _found(plan),
            _cost(plan.tuning),
            _layers(plan),
            _evaluations(plan.tuning),
            plan,
        )
        for number, (policy, plan) in enumerate(evidence.plans.items(), 1)
    )


def plan_plots(section: PlanSection) -> tuple[Plot, ...]:
    """Returns the plots of a section: its layers, and the path of the search."""
    found = (_layers_plot(section), _search_plot(section))
    return tuple(plot for plot in found if plot is not None)


def _found(plan: TunedPlan) -> str:
    tuning = plan.tuning
    number = sum(layer["path"] in set(plan.float32) for layer in tuning["layers"])
    return (
        f"{number} of {len(tuning['layers'])} layers compute in float32, under the "
        f"policy {plan.policy}: {tuning['reason']}. Judged by {tuning['metric']}, "
        f"which may be worse by {float(tuning['tolerance']):g}."
    )


def _cost(tuning: dict[str, Any]) -> str:
    number = len(tuning["evaluations"])
    fresh = " and one on fresh examples" if tuning.get("confirmed") else ""
    spent = sum(each.seconds for each in plan_plot.evaluations(tuning))
    return (
        f"The answer cost {format_seconds(float(tuning['seconds']))}: {number} "
        f"{'evaluation' if number == 1 else 'evaluations'}{fresh}, which took "
        f"{format_seconds(spent)}, and the pass that ranked the layers."
    )


def _layers(plan: TunedPlan) -> Rows:
    float32 = set(plan.float32)

    def order(layer: dict[str, Any]) -> tuple[bool, float]:
        return layer["path"] not in float32, -plan_plot.error_of(layer)

    return tuple(
        (
            layer["path"],
            "float32" if layer["path"] in float32 else "half precision",
            _number(layer["forward_error"]),
            _number(layer["backward_error"]),
            f"{100 * float(layer['saving']):.1f} %",
        )
        for layer in sorted(plan.tuning["layers"], key=order)
    )


def _evaluations(tuning: dict[str, Any]) -> Rows:
    found = []
    for one in plan_plot.evaluations(tuning):
        rest = one.num_float32 - _MOST_NAMED
        shown = [*map(plan_plot.short_path, one.float32[:_MOST_NAMED])]
        if rest > 0:
            shown.append(f"{rest} more")
        row = (
            "fresh examples" if one.is_fresh else str(one.number),
            join_words(shown) if shown else "none beyond the rules'",
            _number(one.worsening) if math.isfinite(one.worsening) else "cannot run",
            _number(one.bound) if math.isfinite(one.bound) else figures.MISSING,
            "holds" if one.holds else "does not hold",
            format_seconds(one.seconds),
        )
        found.append(row)
    return tuple(found)


def _number(value: Any) -> str:
    number = float(value)
    if math.isnan(number):
        return figures.MISSING
    text = f"{number:.2g}" if math.isfinite(number) else "overflow"
    return text.replace("-", "−")


def _layers_plot(section: PlanSection) -> Plot | None:
    marks = plan_plot.marks(section.plan.tuning, section.plan.float32)
    if not marks:
        return None
    axes = drawing.axes_of(_HEIGHT, _BOTTOM)
    plan_plot.draw_layers(axes, marks, _LOOK)
    drawing.set_ticks(axes.yaxis, "", may_be_log=True)
    drawing.set_ticks(axes.xaxis, "% of the whole that it saves")
    _make_room(axes)
    shown = plan_plot.name_layers(axes, marks, _LOOK)
    scale = ", logarithmic" if axes.get_yscale() == "log" else ""
    number = sum(mark.is_float32 for mark in marks)
    names = [mark.path for mark in marks if mark.is_float32]
    worst = max(marks, key=lambda mark: mark.error)
    kept = f", {number} of them in float32: {join_words(names)}" if names else ""
    has_top = any(mark.overflows for mark in marks)
    notes = (
        "Those that overflow stand at the top." if has_top else "",
        "Not all layers are named." if len(shown) < len(marks) else "",
    )
    error = "overflow" if worst.overflows else _number(worst.error)
    return drawing.plot_of(
        axes,
        f"{section.key}-layers",
        "Layers: error against saving",
        f"Upwards the error of each layer alone in half precision{scale}. ■ float32, ● "
        "half precision.",
        f"{len(marks)} layers{kept}. The largest error is that of {worst.path}, "
        f"{error}.",
        tuple(filter(None, notes)),
    )


def _search_plot(section: PlanSection) -> Plot | None:
    tuning = section.plan.tuning
    tries = plan_plot.evaluations(tuning)
    if not tries:
        return None
    axes = drawing.axes_of(_HEIGHT, _BOTTOM)
    tolerance = float(tuning["tolerance"])
    plan_plot.draw_search(axes, tries, tolerance, _LOOK)
    axes.set_xlabel("evaluation", color=drawing.SOFT, fontsize=drawing.FONT_SIZE)
    axes.grid(color=drawing.FAINT, linewidth=1)
    _make_room(axes)
    fresh = "; ◆ on fresh examples" if tries[-1].is_fresh else ""
    each = [
        f"{one.num_float32} layers in float32 "
        f"{_number(one.worsening)} and at most {_number(one.bound)}"
        for one in tries
    ]
    return drawing.plot_of(
        axes,
        f"{section.key}-search",
        "The path of the search",
        f"How much worse {tuning['metric']} is, from the mean to its bound, and how "
        "many layers are in float32 beyond the rules'. Dashed: the tolerance. ● holds, "
        f"✕ does not, ▲ cannot run{fresh}.",
        f"Worsening in {len(tries)} evaluations: {join_words(each)}, with "
        f"{tolerance:g} allowed.",
    )


def _make_room(axes: Any) -> None:
    axes.tick_params(axis="both", length=0)
    ticks = [label.get_text() for label in axes.get_yticklabels()]
    drawing.set_sides(axes, 8 + drawing.room(ticks), 8)
