"""The plot of time by operation, before and after."""

import math
from collections.abc import Sequence

from tfamp.evidence import Evidence, OperationTime
from tfamp.report import palette, strips
from tfamp.report.figures import Format, format_for
from tfamp.report.palette import Look
from tfamp.report.scales import Scale
from tfamp.report.strips import Group, Line
from tfamp.report.svg import Plot, bar

# Operations with a line of their own; the rest is one line.
_MAX_LINES = 12


def operation_plots(evidence: Evidence, looks: Sequence[Look]) -> tuple[Plot, ...]:
    """Returns a plot for each policy that a profile was taken of."""
    found = []
    for number, look in enumerate(looks):
        times = evidence.operations.get(look.policy, ())
        times = tuple(time for time in times if _longest(time) > 0)
        if times:
            found.append(_plot(f"operations-{number}", looks[0], look, times))
    return tuple(found)


def _plot(
    key: str, reference: Look, look: Look, times: Sequence[OperationTime]
) -> Plot:
    ordered = sorted(times, key=_longest, reverse=True)
    shown = ordered[:_MAX_LINES]
    if rest := ordered[_MAX_LINES:]:
        before = sum(time.before_seconds for time in rest)
        after = sum(time.after_seconds for time in rest)
        shown.append(OperationTime(f"{len(rest)} others", before, after))
    form = format_for("seconds", [_longest(shown[0])])
    lines = tuple(_line(reference, look, time, form) for time in shown)
    total = [
        sum(getattr(time, name) for time in times)
        for name in ("before_seconds", "after_seconds")
    ]
    summary = (
        f"Time of a step by operation in {form.unit}, {reference.name} to {look.name}: "
        f"all {form(total[0])} to {form(total[1])}; "
        + "; ".join(f"{line.label} {line.value}" for line in lines)
        + "."
    )
    return Plot(
        key,
        f"Operations: {look.name}",
        f"Of a step, all threads together. Upper bar {reference.name}, lower bar "
        f"{look.name}; in all {form(total[0])} → {form(total[1])} {form.unit}.",
        summary,
        strips.chart([Group("", lines)], unit=form.unit, summary=summary),
    )


def _line(reference: Look, look: Look, time: OperationTime, form: Format) -> Line:
    values = [
        seconds / form.factor if math.isfinite(seconds) else 0.0
        for seconds in (time.before_seconds, time.after_seconds)
    ]

    def draw(across: Scale, y: float) -> list[str]:
        ends = [across(value) for value in values]
        return [
            bar(across.start, ends[0], y - 4, 6, f"fill {reference.style}"),
            bar(across.start, ends[1], y + 4, 6, f"fill {look.style}"),
        ]

    text = f"{form(time.before_seconds)} → {form(time.after_seconds)}"
    label = palette.shortened(time.operation)
    return Line(label, look.style, text, tuple(values), draw)


def _longest(time: OperationTime) -> float:
    values = (time.before_seconds, time.after_seconds)
    return max((value for value in values if math.isfinite(value)), default=0.0)
