"""A measurement of replicas as one HTML file that needs nothing else to be read."""

import os
from collections.abc import Callable
from typing import Any

from tfamp.comparison.replicas import text
from tfamp.comparison.replicas.records import Findings, ScalingPoint
from tfamp.comparison.report import bars, drawing
from tfamp.comparison.report.bars import Group, Line
from tfamp.comparison.report.drawing import Plot
from tfamp.comparison.report.html import resource
from tfamp.comparison.report.sentences import Badge
from tfamp.records import checks, files
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.trials.intervals import Interval

_BADGES = {
    "scales": Badge("Scales", "good", "✓"),
    "communication": Badge("Communication costs most", "open", "↔"),
    "input": Badge("The input costs most", "open", "↓"),
    "slow worker": Badge("A slow worker costs most", "open", "…"),
    "not equal": Badge("Not equal to one device", "bad", "✕"),
    "unclear": Badge("Unclear", "open", "?"),
}
_COLUMNS = (
    *("Scaling", "Replicas", "Batch", "Step", "Efficiency", "Communication"),
    *("Slowest", "Input", "Sent a step"),
)
# Where an interval is cut, as one without an end would leave room for nothing else.
_MOST = 2.0
_WEAK, _STRONG = drawing.COLOURS[1], drawing.COLOURS[2]


def to_html(found: Findings, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a measurement as one HTML file and writes it to `path`, if given."""
    jinja2 = checks.require("jinja2", extra="report", purpose="`to_html`")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.from_string(resource("scaling.html"))
    page: str = template.render(**_view(found))
    if path is not None:
        files.write_text(path, page)
    return page


def plots(found: Findings) -> tuple[Plot, ...]:
    """Returns the plots of efficiency and of the parts of a step, where timed."""
    return tuple(plot for plot in (_efficiency(found), _shares(found)) if plot)


def _view(found: Findings) -> dict[str, Any]:
    """Returns what the template shows, under the names that it uses."""
    lists = (
        ("First steps", "equality", text.equality_lines(found)),
        ("One device", "one-device", text.one_device_lines(found)),
        ("Notes", "notes", found.notes),
    )
    return {
        "title": f"{found.model}, {found.policy}, on {found.kind}",
        "css": resource("style.css"),
        "badge": _BADGES[found.verdict],
        "sentence": found.reason,
        "advice": text.advice_of(found),
        "tiles": () if found.judged is None else _tiles(found.judged),
        "columns": _COLUMNS,
        "rows": text.rows(found),
        "plots": plots(found),
        "lists": [each for each in lists if each[2]],
        "settings": [
            ("Devices", ", ".join(dict.fromkeys(found.devices))),
            ("Batch", f"{found.batch_size:,} examples on one device"),
            ("Turns", f"{found.rounds:,} of each step"),
            *((name, version or "missing") for name, version in found.versions.items()),
        ],
    }


def _tiles(point: ScalingPoint) -> list[tuple[str, str, str]]:
    """Returns label, figure and remark of the figures that the verdict is about."""
    of = f"{point.replicas} replicas, a batch each"
    found = [
        ("Efficiency", f"{point.efficiency.estimate:.2f}", of),
        (
            "Communication",
            format_share(point.communication_share.estimate),
            "of a step",
        ),
        ("Input", format_share(point.input_share), "of a step"),
    ]
    if point.sent_bytes is not None:
        sent = format_bytes(point.sent_bytes)
        found.append(("Sent", sent, "by each replica in a step, in a ring"))
    else:
        found.append(("Step", format_seconds(point.step_seconds), of))
    return found


def _efficiency(found: Findings) -> Plot | None:
    groups: list[Group] = []
    for mode, colour in (("weak", _WEAK), ("strong", _STRONG)):
        points = found.of_mode(mode)  # type: ignore[arg-type]  # both are modes
        lines = [_line(f"{p.replicas} replicas", p.efficiency, colour) for p in points]
        groups.append((f"{mode.capitalize()} scaling", lines))
    lead = "1 is as many examples a second as that many devices alone; bar: interval."
    return bars.plot_lines("efficiency", "Efficiency", lead, groups, "of one device")


def _shares(found: Findings) -> Plot | None:
    groups: list[Group] = []
    for point in found.of_mode("weak"):
        exact = Interval(*[point.input_share] * 3)
        shares = {
            "communication": point.communication_share,
            "slowest worker": point.slow_worker_share,
            "input": exact,
        }
        lines = [_line(n, s, _WEAK) for n, s in shares.items() if s is not None]
        groups.append((f"{point.replicas} replicas", lines))
    lead = "Weak scaling; bar: interval. What computing hides is in none of them."
    return bars.plot_lines("shares", "Where a step waits", lead, groups, "of a step")


def _line(label: str, found: Interval, colour: str) -> Line:
    return Line(label, f"{found.estimate:.2f}", _drawn(found, colour))


def _drawn(found: Interval, colour: str) -> Callable[[Any, float], None]:
    low, high = max(found.low, 0.0), min(found.high, _MOST)

    def draw(axes: Any, y: float) -> None:
        axes.barh(y, found.estimate, 3, color=colour, alpha=0.5)
        axes.barh(y, max(high - low, 0.0), 12, left=low, color=colour, alpha=0.3)
        axes.vlines(found.estimate, y - 8, y + 8, colors=colour, linewidths=2)

    return draw
