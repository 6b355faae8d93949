"""Plots with a line for each policy: values across, names beside them."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from tfamp.evidence import Interval
from tfamp.report import scales, svg
from tfamp.report.scales import Scale

_ROW, _HEADING, _BOTTOM = 24.0, 22.0, 36.0
_GAP = 8.0
# An axis leaves out what of an interval lies this far beyond the values.
_REACH = 0.3


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a plot.

    Args:
        label: Beside it, at the left.
        style: Classes of its colour.
        value: Beside it, at the right.
        values: All that the axis has to hold.
        draw: Gives the marks from the axis and the line's height.
    """

    label: str
    style: str
    value: str
    values: tuple[float, ...]
    draw: Callable[[Scale, float], list[str]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Lines under one heading, "" for none."""

    heading: str
    lines: tuple[Line, ...]


def chart(
    groups: Sequence[Group],
    *,
    unit: str,
    summary: str,
    from_zero: bool = True,
    may_be_log: bool = False,
    mark: float | None = None,
    zone: tuple[float, float] | None = None,
) -> str:
    """Returns the drawing of groups of lines over one axis.

    Args:
        groups: From top to bottom.
        unit: What the axis counts.
        summary: What one would see.
        from_zero: Whether the axis starts at 0.
        may_be_log: Whether it is logarithmic where values lie far apart.
        mark: A value to compare with, as an upright line.
        zone: A part of the axis to be shaded.
    """
    lines = [line for group in groups for line in group.lines]
    values = [value for line in lines for value in line.values]
    values += [] if mark is None else [mark]
    values += [] if zone is None else [end for end in zone if math.isfinite(end)]
    left = _GAP + svg.LETTER * max(len(line.label) for line in lines)
    right = svg.WIDTH - _GAP - svg.LETTER * max(len(line.value) for line in lines)
    across = scales.scale(
        values, left, right, from_zero=from_zero, may_be_log=may_be_log
    )
    parts: list[str] = []
    y = 4.0
    for group in groups:
        if group.heading:
            parts.append(svg.text(0, y + 14, group.heading, class_="heading"))
            y += _HEADING
        for line in group.lines:
            middle = y + _ROW / 2
            parts.append(svg.text(0, middle + 3.5, line.label, class_="label"))
            parts += line.draw(across, middle)
            parts.append(
                svg.text(
                    svg.WIDTH, middle + 3.5, line.value, anchor="end", class_="value"
                )
            )
            y += _ROW
        y += 4 if group.heading else 0
    behind = _axis(across, y + 2, unit)
    if zone is not None:
        ends = [across(end) for end in zone]
        height = y - 4
        behind.insert(0, svg.bar(min(ends), max(ends), 4 + height / 2, height, "zone"))
    if mark is not None:
        parts.insert(0, svg.line(across(mark), 4, across(mark), y, "mark"))
    return svg.drawing(y + _BOTTOM, summary, *behind, *parts)


def runs_line(
    label: str,
    style: str,
    value: str,
    dots: Sequence[tuple[str, float]],
    found: Interval,
    *,
    stem: bool = True,
) -> Line:
    """Returns a line with a dot for each run and a bar for the interval.

    Args:
        label: At the left.
        style: Classes of its colour.
        value: At the right.
        dots: What each run is called, and its value.
        found: Of the middle; unknown ends give no bar.
        stem: Whether a thin line leads from 0 to the middle.
    """
    known = [value for _, value in dots if math.isfinite(value)]
    held = [*known, *reachable(found, known)]

    def draw(across: Scale, y: float) -> list[str]:
        parts = []
        if stem and math.isfinite(found.estimate):
            start, end = across(0.0), across(found.estimate)
            parts.append(svg.bar(start, end, y, 3, f"stem {style}"))
        if held and len(held) > len(known):
            ends = (across(found.low), across(found.high))
            parts.append(svg.bar(*ends, y, 12, f"interval {style}"))
            parts += _arrows(across, y, found, style)
        if math.isfinite(found.estimate):
            x = across(found.estimate)
            parts.append(svg.line(x, y - 8, x, y + 8, f"middle {style}"))
        shown = [(tip, value) for tip, value in dots if math.isfinite(value)]
        for (tip, value), offset in zip(shown, offsets(len(shown)), strict=True):
            parts.append(svg.dot(across(value), y + offset, 2.6, f"dot {style}", tip))
        return parts

    return Line(label, style, value, tuple(held), draw)


def _arrows(across: Scale, y: float, found: Interval, style: str) -> list[str]:
    """Returns a mark at each end of the axis that the interval goes beyond."""
    parts = []
    for is_beyond, tip, back in (
        (found.low < across.low, across.start + 1, 5),
        (found.high > across.high, across.end - 1, -5),
    ):
        if is_beyond:
            points = [(tip + back, y - 5), (tip, y), (tip + back, y + 5)]
            parts.append(svg.path(points, f"line {style}"))
    return parts


def reachable(found: Interval, values: Sequence[float]) -> tuple[float, ...]:
    """Returns the ends of an interval, cut where they would dwarf the values.

    Example:
        >>> reachable(Interval(2.0, 1.0, 100.0), [1.5, 2.5])
        (1.0, 3.25)
    """
    if not values or not (math.isfinite(found.low) and math.isfinite(found.high)):
        return ()
    room = _REACH * max(abs(value) for value in values)
    return max(found.low, min(values) - room), min(found.high, max(values) + room)


def offsets(number: int, height: float = 9.0) -> list[float]:
    """Returns how far marks stand above or below a line so that all are seen.

    Example:
        >>> offsets(3)
        [-3.0, 0.0, 3.0]
    """
    step = min(3.0, height / max(number - 1, 1))
    return [step * (index - (number - 1) / 2) for index in range(number)]


def _axis(across: Scale, y: float, unit: str) -> list[str]:
    """Returns the axis below, with lines up through the plot."""
    parts = []
    for value, label in across.ticks():
        x = across(value)
        parts.append(svg.line(x, 4, x, y, "grid"))
        parts.append(svg.text(x, y + 13, label, anchor="middle"))
    parts.append(svg.line(across.start, y, across.end, y, "axis"))
    middle = (across.start + across.end) / 2
    parts.append(svg.text(middle, y + 29, unit, anchor="middle", class_="name"))
    return parts
