"""What a load test found: latencies by rate, in a table and as a page of curves."""

import dataclasses
import html
import importlib.resources
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tfamp.records import console, record
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_seconds

# A percentile says something where so many requests lie beyond it.
_BEYOND = 1
# Above it the generator's own lateness is part of what it shows.
_MAX_LATENESS = 0.002
_PERCENTILES = {"p50": "Median", "p99": "99th percentile", "p999": "99.9th percentile"}
# Of a plot, in units of its drawing.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 430, 250, 62, 14, 12, 44
_MAX_COLOURS = 6
_COLUMNS = ("Rate/s", "Server", "Answered/s", "p50", "p99", "p99.9", "Errors")
_TEXT_COLUMNS = (1, 6)
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>Load test</title>
<style>
{css}
.numbers thead th {{ white-space: nowrap; }}
</style>
</head>
<body>
<main>
<header>
<p class="over">Load test</p>
<h1>{title}</h1>
<p class="reference">{lead}</p>
</header>
<section aria-labelledby="curves">
<h2 id="curves">Latency at each rate</h2>
<ul class="legend" aria-label="Colours of the servers">
{legend}
</ul>
<div class="plots two">
{plots}
</div>
</section>
<section aria-labelledby="figures">
<h2 id="figures">Figures</h2>
<div class="scroll" role="region" tabindex="0" aria-labelledby="figures">
<table class="list numbers">
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{notes}
</section>
</main>
</body>
</html>
"""


class Burst(NamedTuple):
    """What came of the requests at one rate.

    Args:
        seconds: From the first moment that was due to the last answer.
        latencies: Seconds of each request that was answered with 200, from the moment
            that it was due.
        lateness: Seconds by which the generator itself sent each too late.
        errors: What the others came to -> how many: a status, "timeout", an error.
    """

    seconds: float
    latencies: tuple[float, ...]
    lateness: tuple[float, ...]
    errors: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Load(Record):
    """A server at one rate. Latencies are seconds from when a request was due.

    Args:
        target: Address and model.
        rate: Requests due in a second.
        answered_per_second: Requests answered with 200 in a second.
        num_requests: Requests due.
        p50: Median latency of those answered; None where none was.
        p99: 99th percentile; None of fewer than 100 answers.
        p999: 99.9th percentile; None of fewer than 1000 answers.
        errors: Status, "timeout" or error -> how many.
        lateness_p99: 99th percentile of how late the generator itself sent.
    """

    target: str
    rate: float
    answered_per_second: float
    num_requests: int
    p50: float | None
    p99: float | None
    p999: float | None
    errors: dict[str, int]
    lateness_p99: float

    @classmethod
    def of(cls, target: str, rate: float, burst: Burst) -> "Load":
        """Returns what the requests at one rate came to."""
        count = len(burst.latencies)

        def percentile(part: float) -> float | None:
            if count == 0 or count * (1 - part) < _BEYOND - 1e-9 and part > 0.5:
                return None
            return float(np.quantile(burst.latencies, part))

        late = float(np.quantile(burst.lateness, 0.99)) if burst.lateness else 0.0
        return cls(
            target=target,
            rate=rate,
            answered_per_second=count / burst.seconds,
            num_requests=len(burst.lateness),
            p50=percentile(0.5),
            p99=percentile(0.99),
            p999=percentile(0.999),
            errors=burst.errors,
            lateness_p99=late,
        )


@dataclasses.dataclass(frozen=True)
class LoadTest(TableRecord):
    """Servers, or exports, under the same load, in turns.

    Args:
        protocol: "binary", "json" or "predict"; of servers with several, all of them.
        batch_size: Examples in a request.
        seconds: Of each rate.
        loads: Each server at each rate.
    """

    protocol: str
    batch_size: int
    seconds: float
    loads: tuple[Load, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The servers, in the order that they were named in."""
        return tuple(dict.fromkeys(load.target for load in self.loads))

    def of(self, target: str) -> tuple[Load, ...]:
        """Returns what one server came to, by rate."""
        own = (load for load in self.loads if load.target == target)
        return tuple(sorted(own, key=lambda load: load.rate))

    def ordered(self) -> list[Load]:
        """Returns all loads by rate, those of a rate in the order of the servers."""
        place = {target: number for number, target in enumerate(self.targets)}
        return sorted(self.loads, key=lambda load: (load.rate, place[load.target]))

    def notes(self) -> tuple[str, ...]:
        """Returns what the figures have to be read with."""
        late = max((load.lateness_p99 for load in self.loads), default=0.0)
        found = []
        if late > _MAX_LATENESS:
            found.append(
                f"The generator itself sent up to {format_seconds(late)} late (99 % of "
                "requests): latencies hold that, too. Give it a core of its own."
            )
        if any(load.p999 is None for load in self.loads):
            found.append(
                "A percentile needs a request beyond it: p99.9 a thousand answers. "
                "Raise `seconds` where it is missing."
            )
        return tuple(found)

    def table(self) -> str:
        """Returns a line for each rate and server, those of a rate together."""
        columns = {
            **{"rate": console.RIGHT, "server": console.FOLD},
            **dict.fromkeys(("answered/s", "p50", "p99", "p99.9"), console.RIGHT),
            "errors": console.FOLD,
        }
        rows = [row_of(load) for load in self.ordered()]
        table = console.table(columns, rows)
        return console.text_of(table, *self.notes())


def row_of(load: Load) -> Sequence[str]:
    """Returns the cells of a server at one rate."""
    return (
        *(f"{load.rate:,.0f}", load.target, f"{load.answered_per_second:,.0f}"),
        *map(_time, (load.p50, load.p99, load.p999)),
        ", ".join(f"{count:,} {what}" for what, count in load.errors.items()) or "none",
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def to_html(test: LoadTest, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a load test as one HTML file and writes it to `path`, if given.

    The file loads nothing, and follows the reader's choice of light or dark.
    """
    style = importlib.resources.files("tfamp").joinpath("comparison/report/style.css")
    lead = (
        f"Requests of {test.batch_size} by the protocol “{test.protocol}”, "
        f"{test.seconds:g} s at each rate. Their moments were drawn before and did not "
        "wait for answers; latencies count from these moments, and errors are not in "
        "them."
    )
    if len(test.targets) > 1:
        lead += " The servers were asked the same in turns."
    drawn = (_plot(test, name, words) for name, words in _PERCENTILES.items())
    heads = (
        f'<th scope="col"{_right(n)}>{words}</th>' for n, words in enumerate(_COLUMNS)
    )
    page = _PAGE.format(
        css=style.read_text(encoding="utf-8"),
        title=html.escape(" against ".join(test.targets)),
        lead=html.escape(lead),
        legend="\n".join(
            f'<li><span class="key {_colour(n)}" aria-hidden="true"></span>'
            f"{html.escape(target)}</li>"
            for n, target in enumerate(test.targets)
        ),
        plots="\n".join(figure for figure in drawn if figure),
        heads="".join(heads),
        rows="\n".join(map(_row, test.ordered())),
        notes="\n".join(
            f'<p class="caption">{html.escape(note)}</p>' for note in test.notes()
        ),
    )
    if path is not None:
        record.write_text(path, page)
    return page


def _colour(number: int) -> str:
    return f"c{(number + 1) % _MAX_COLOURS}"


def _right(number: int) -> str:
    """Returns the class of a column of numbers."""
    return ' class="right"' if number not in _TEXT_COLUMNS else ""


def _row(load: Load) -> str:
    rate, *rest = map(html.escape, row_of(load))
    cells = (f"<td{_right(n)}>{text}</td>" for n, text in enumerate(rest, start=1))
    return f'<tr><th scope="row" class="right">{rate}</th>{"".join(cells)}</tr>'


def _plot(test: LoadTest, name: str, words: str) -> str:
    """Returns the figure of a percentile; "" where no server has it."""
    curves = []
    for target in test.targets:
        pairs = [(each.rate, getattr(each, name)) for each in test.of(target)]
        curves.append([(rate, value) for rate, value in pairs if value is not None])
    values = [value for curve in curves for _, value in curve]
    if not values:
        return ""
    # Whole decades, so that plots of the same servers look alike.
    low = 10.0 ** math.floor(math.log10(min(values)))
    high = 10.0 ** math.ceil(math.log10(max(values)))
    high = high if high > low else 10 * low
    right = max(rate for curve in curves for rate, _ in curve)

    def place(rate: float, value: float) -> tuple[float, float]:
        part = math.log(value / low) / math.log(high / low)
        return (
            _LEFT + rate / right * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [*_grid(low, high, right, place)]
    for number, curve in enumerate(curves):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*p) for p in curve))
        parts.append(
            f'<g class="{_colour(number)}" stroke="var(--c)" fill="var(--c)">'
            f'<polyline points="{points}" fill="none" stroke-width="2"/>'
            + "".join(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" stroke="none"/>'
                for x, y in (place(*p) for p in curve)
            )
            + "</g>"
        )
    summary = html.escape(
        f"{words} of the latency against the rate, of {len(curves)} servers"
    )
    return (
        f'<figure id="plot-{name}"><figcaption><h3>{words}</h3>'
        "<p>Latency against requests due in a second; lower is better.</p>"
        f'</figcaption><svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{summary}" font-size="12">{"".join(parts)}</svg></figure>'
    )


def _grid(
    low: float,
    high: float,
    right: float,
    place: Callable[[float, float], tuple[float, float]],
) -> Sequence[str]:
    """Returns lines and labels of both axes."""
    found = []
    for power in range(round(math.log10(high / low)) + 1):
        value = low * 10**power
        x, y = place(right, value)
        found.append(
            f'<line x1="{_LEFT}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--line)"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" '
            f'fill="var(--soft)">{format_seconds(value)}</text>'
        )
    for part in (0.0, 0.5, 1.0):
        x, y = place(part * right, low)
        anchor = {0.0: "middle", 0.5: "middle", 1.0: "end"}[part]
        found.append(
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}" '
            f'fill="var(--soft)">{part * right:,.0f}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    found.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle" '
        'fill="var(--soft)">requests due in a second</text>'
    )
    return found
