"""`Scaling`: what a measurement of replicas found, as a table and as a page."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfamp.comparison.replicas.judgement import (
    Equality,
    Kind,
    Mode,
    OneDevice,
    ScalingPoint,
    Verdict,
)
from tfamp.comparison.report import bars, drawing
from tfamp.comparison.report.bars import Group, Line
from tfamp.comparison.report.drawing import Plot
from tfamp.comparison.report.html import Tile, page_of
from tfamp.comparison.report.sentences import Badge
from tfamp.records import console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.trials.intervals import Interval

_MISSING = "-"
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


@dataclasses.dataclass(frozen=True)
class Scaling(TableRecord):
    """What more replicas bring, and what holds them up.

    `.verdict`, `.reason` and `.advice` are the answer, `.points` has each figure,
    `.to_json(path)` writes all of it, and `.to_html(path)` a page to look at.

    Args:
        model: The model's name.
        policy: What it computes in.
        kind: What the replicas were: "logical CPUs" or "GPUs" of one process, or
            "workers", a process each on this host.
        devices: Their names.
        shares_devices: Whether replicas share what they compute with, as logical CPUs
            do: then efficiency says nothing of devices of their own.
        batch_size: Examples of a step on one device.
        verdict: "scales"; "communication", "input" or "slow worker", what costs most;
            "not equal" where the first steps are not those of one device; "unclear".
        reason: Why, in a sentence.
        advice: What to change, most promising first.
        one_device: What one device says.
        equality: Of each number of replicas.
        points: Of each number of replicas, strong and weak; none where the steps are
            not equal, as their speed is then worth nothing.
        rounds: Turns that each step had.
        notes: What else a reader should know.
        versions: Of Python's packages.
    """

    model: str
    policy: str
    kind: Kind
    devices: tuple[str, ...]
    shares_devices: bool
    batch_size: int
    verdict: Verdict
    reason: str
    advice: tuple[str, ...]
    one_device: OneDevice
    equality: tuple[Equality, ...]
    points: tuple[ScalingPoint, ...]
    rounds: int = 0
    notes: tuple[str, ...] = ()
    versions: dict[str, str | None] = dataclasses.field(
        default_factory=dict, hash=False
    )

    @property
    def judged(self) -> ScalingPoint | None:
        """The weak scaling of the most replicas, which the verdict is about."""
        weak = self.of_mode("weak")
        return weak[-1] if weak else None

    @property
    def efficiency(self) -> float | None:
        """Of the most replicas with a batch each; None where nothing was timed."""
        return None if self.judged is None else self.judged.efficiency.estimate

    @property
    def communication_share(self) -> float | None:
        """Of the same steps: the part that goes without the reduction."""
        if self.judged is None:
            return None
        return self.judged.communication_share.estimate

    @property
    def input_share(self) -> float | None:
        """Of the same steps: the part that would wait for the input."""
        return None if self.judged is None else self.judged.input_share

    def of_mode(self, mode: Mode) -> tuple[ScalingPoint, ...]:
        """Returns the points of strong or of weak scaling, fewest replicas first."""
        return tuple(point for point in self.points if point.mode == mode)

    def table(self) -> str:
        """Returns figures, verdict and advice as text of at most 110 columns."""
        names = ("batch", "step", "efficiency", "communication", "slowest", "input")
        right = dict.fromkeys(("n", *names, "sent"), console.RIGHT)
        devices = ", ".join(dict.fromkeys(self.devices))
        title = f"{self.model}, {self.policy}, on {self.kind} ({devices})"
        columns = {"scaling": console.WHOLE, **right}
        figures = console.table(columns, _rows(self), title=title)
        return console.text_of(
            figures if self.points else title,
            f"Verdict: {self.verdict}. {self.reason}",
            *(f"{i}. {line}" for i, line in enumerate(_advice_of(self), 1)),
            _one_device(self),
            *_equality_lines(self),
            *(f"Note: {note}" for note in self.notes),
        )

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns all of it as one HTML file, which loads nothing from elsewhere.

        Args:
            path: Where to write it too; the folder has to exist.

        Raises:
            ImportError: jinja2 or matplotlib is missing; `pip install
                'tfamp[report]'` brings both.
        """
        return page_of("scaling.html", _view(self), path)


def _rows(found: Scaling) -> list[tuple[str, ...]]:
    """Returns a row for one device and for each point; none where nothing was timed."""
    if not found.points:
        return []
    one = found.one_device
    seconds = one.step_seconds
    first = (
        *("one device", "1", f"{found.batch_size:,}"),
        _MISSING if seconds is None else format_seconds(seconds),
        *("1.00", _MISSING, _MISSING, format_share(one.input.possible_gain), _MISSING),
    )
    return [first, *map(_row, (*found.of_mode("weak"), *found.of_mode("strong")))]


def _row(point: ScalingPoint) -> tuple[str, ...]:
    slow = point.slow_worker_share
    return (
        *(point.mode, str(point.replicas), f"{point.batch_size:,}"),
        format_seconds(point.step_seconds),
        f"{point.efficiency.estimate:.2f} "
        f"[{point.efficiency.low:.2f}, {point.efficiency.high:.2f}]",
        _share(point.communication_share),
        _MISSING if slow is None else _share(slow),
        format_share(point.input_share),
        _MISSING if point.sent_bytes is None else format_bytes(point.sent_bytes),
    )


def _share(found: Interval) -> str:
    """Returns a share in percent with its interval."""
    return (
        f"{100 * found.estimate:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"
    )


def _advice_of(found: Scaling) -> list[str]:
    """Returns advice without numbers of its own."""
    return [line.lstrip("0123456789. ") for line in found.advice]


def _one_device(found: Scaling) -> str:
    one = found.one_device
    return (
        f"One device: {format_share(one.half_share_of_flops)} of the products in half "
        f"precision; the input: {one.input.verdict}, {one.input.reason}."
    )


def _equality_lines(found: Scaling) -> list[str]:
    """Returns for each number of replicas whether its first steps are right."""
    words = {True: "equal", False: "NOT equal", None: "not known to be equal"}
    return [
        f"First {each.num_steps} steps of {each.replicas} replicas: "
        f"{words[each.is_equal]} to those of one device; "
        + ", ".join(
            f"{name} {distance:.1e} apart (rounding allows {each.tolerances[name]:.1e})"
            for name, distance in each.distances.items()
        )
        + "."
        for each in found.equality
    ]


def _view(found: Scaling) -> dict[str, Any]:
    """Returns what the template shows, under the names that it uses."""
    lists = (
        ("First steps", "equality", _equality_lines(found)),
        ("One device", "one-device", [_one_device(found)]),
        ("Notes", "notes", found.notes),
    )
    plots = (_efficiency_plot(found), _shares_plot(found))
    return {
        "title": f"{found.model}, {found.policy}, on {found.kind}",
        "badge": _BADGES[found.verdict],
        "sentence": found.reason,
        "advice": _advice_of(found),
        "tiles": () if found.judged is None else _tiles(found.judged),
        "columns": _COLUMNS,
        "rows": _rows(found),
        "plots": [plot for plot in plots if plot is not None],
        "lists": [each for each in lists if each[2]],
        "settings": [
            ("Devices", ", ".join(dict.fromkeys(found.devices))),
            ("Batch", f"{found.batch_size:,} examples on one device"),
            ("Turns", f"{found.rounds:,} of each step"),
            *((name, version or "missing") for name, version in found.versions.items()),
        ],
    }


def _tiles(point: ScalingPoint) -> list[Tile]:
    """Returns the figures that the verdict is about."""
    of = f"{point.replicas} replicas, a batch each"
    communication = format_share(point.communication_share.estimate)
    last = Tile("Step", format_seconds(point.step_seconds), of)
    if point.sent_bytes is not None:
        sent = format_bytes(point.sent_bytes)
        last = Tile("Sent", sent, "by each replica in a step, in a ring")
    return [
        Tile("Efficiency", f"{point.efficiency.estimate:.2f}", of),
        Tile("Communication", communication, "of a step"),
        Tile("Input", format_share(point.input_share), "of a step"),
        last,
    ]


def _efficiency_plot(found: Scaling) -> Plot | None:
    groups: list[Group] = []
    for mode, colour in (("weak", _WEAK), ("strong", _STRONG)):
        points = found.of_mode(mode)  # type: ignore[arg-type]  # both are modes
        each = {f"{point.replicas} replicas": point.efficiency for point in points}
        groups.append((f"{mode.capitalize()} scaling", _lines(each, colour)))
    lead = "1 is as many examples a second as that many devices alone; bar: interval."
    return bars.plot_lines("efficiency", "Efficiency", lead, groups, "of one device")


def _shares_plot(found: Scaling) -> Plot | None:
    groups: list[Group] = []
    for point in found.of_mode("weak"):
        shares = {
            "communication": point.communication_share,
            "slowest worker": point.slow_worker_share,
            "input": Interval(*[point.input_share] * 3),
        }
        groups.append((f"{point.replicas} replicas", _lines(shares, _WEAK)))
    lead = "Weak scaling; bar: interval. What computing hides is in none of them."
    return bars.plot_lines("shares", "Where a step waits", lead, groups, "of a step")


def _lines(found: Mapping[str, Interval | None], colour: str) -> list[Line]:
    return [
        Line(label, f"{each.estimate:.2f}", _drawn(each, colour))
        for label, each in found.items()
        if each is not None
    ]


def _drawn(found: Interval, colour: str) -> Callable[[Any, float], None]:
    low, high = max(found.low, 0.0), min(found.high, _MOST)

    def draw(axes: Any, y: float) -> None:
        axes.barh(y, found.estimate, 3, color=colour, alpha=0.5)
        axes.barh(y, max(high - low, 0.0), 12, left=low, color=colour, alpha=0.3)
        axes.vlines(found.estimate, y - 8, y + 8, colors=colour, linewidths=2)

    return draw
