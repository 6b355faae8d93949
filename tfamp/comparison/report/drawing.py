"""Drawings by matplotlib that take the page's colours: SVG text to stand in HTML."""

import dataclasses
import html
import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report import sentences
from tfamp.records import checks

# Points: legible on a phone, three of them beside one another on a desk.
WIDTH = 360.0
# Of a letter of the smallest size, in the sans-serif fonts of usual systems.
LETTER = 6.2
TOP, FONT_SIZE = 4.0, 10.5
INK, SOFT, FAINT, CARD, ZONE = "#1b1e24", "#585f6b", "#dfe2e7", "#ffffff", "#e8edf5"
# Told apart by colour-blind readers too (Okabe & Ito, 2008), the reference's first;
# more policies begin anew, with broken lines.
COLOURS = ("#5b6472", "#0072b2", "#d55e00", "#009e73", "#b5559a", "#a87d00")
# The style sheet has a light and a dark value for each.
_VARIABLES = {
    **{INK: "ink", SOFT: "soft", FAINT: "line", CARD: "card", ZONE: "neutral-back"},
    **{colour: f"c{number}" for number, colour in enumerate(COLOURS)},
}
# Text stays text, in the page's own font.
_SETTINGS = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
# From this ratio on small values are not seen beside large ones.
_LOG_FROM = 30
_MAX_TICKS = 5
# Letters that a name may have beside a plot.
_MAX_LETTERS = 18


@dataclasses.dataclass(frozen=True)
class Look:
    """How a policy is drawn, the same in every plot.

    `name` has what it came to beside it, `short` is the same in few letters; `number`
    is its place among the policies, of which the reference is 0.
    """

    policy: str
    name: str
    short: str
    number: int

    @property
    def is_reference(self) -> bool:
        """Whether the others are held against it."""
        return self.number == 0

    @property
    def colour(self) -> str:
        """As matplotlib takes it."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def line(self) -> dict[str, Any]:
        """Colour and dashes of a line."""
        dashes = "-" if self.number < len(COLOURS) else "--"
        return {"color": self.colour, "linestyle": dashes}

    @property
    def style(self) -> str:
        """Classes of the style sheet."""
        broken = " broken" if self.number >= len(COLOURS) else ""
        return f"c{self.number % len(COLOURS)}{broken}"


class Plot(NamedTuple):
    """One drawing with what goes around it.

    `lead` says what axes and marks are, `summary` what one would see, for those who do
    not, `notes` what is not shown.
    """

    key: str
    title: str
    lead: str
    summary: str
    svg: str
    notes: tuple[str, ...] = ()


def looks(evidence: Evidence) -> tuple[Look, ...]:
    """Returns the look of each policy, the reference first."""
    found: list[Look] = []
    for number, policy in enumerate((evidence.reference, *evidence.candidates)):
        short = shortened(evidence.label(policy))
        if any(look.short == short for look in found):
            short = f"{short[: _MAX_LETTERS - 3]}·{number}"
        name = sentences.named(evidence, policy)
        found.append(Look(policy, name, short, number))
    return tuple(found)


def shortened(name: str) -> str:
    """Returns a name with the middle left out where it is long.

    Example:
        >>> shortened("mixed_bfloat16"), shortened("keras:mixed_bfloat16+xla")
        ('mixed_bfloat16', 'keras:mix…at16+xla')
    """
    if len(name) <= _MAX_LETTERS:
        return name
    half = _MAX_LETTERS // 2
    return f"{name[:half]}…{name[-(_MAX_LETTERS - half - 1) :]}"


def room(texts: Sequence[str]) -> float:
    """Returns the width that the longest of some texts takes, in points."""
    return LETTER * max(map(len, texts), default=0)


def axes_of(height: float, bottom: float) -> Any:
    """Returns axes that fill a figure of their own, but for `bottom` points below."""
    size = WIDTH / 72, height / 72
    figure = checks.figure("`to_html`", *size, layout=None, dpi=72, frameon=False)
    axes = figure.add_axes((0, bottom / height, 1, (height - bottom - TOP) / height))
    axes.patch.set_visible(False)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    axes.set_axisbelow(True)
    axes.tick_params(color=SOFT, labelcolor=SOFT, labelsize=FONT_SIZE, width=1)
    axes.use_sticky_edges = False
    axes.margins(x=0.04, y=0.04)
    return axes


def set_sides(axes: Any, left: float, right: float) -> None:
    """Leaves `left` and `right` points free beside the axes."""
    box = axes.get_position()
    axes.set_position((left / WIDTH, box.y0, 1 - (left + right) / WIDTH, box.height))


def write(axes: Any, x: float, y: float, text: str, **how: Any) -> None:
    """Writes at a distance in points from the figure's left and upper edges."""
    how = {"color": INK, "fontsize": FONT_SIZE, "va": "center_baseline", **how}
    height = 72 * axes.figure.get_figheight()
    axes.figure.text(x / WIDTH, 1 - y / height, text, parse_math=False, **how)


def set_ticks(
    axis: Any,
    name: str,
    *,
    from_zero: bool = False,
    may_be_log: bool = False,
    whole: bool = False,
) -> None:
    """Gives an axis round numbers and faint lines, after all is drawn on it.

    Bars need it `from_zero`; `may_be_log` makes it logarithmic where values lie far
    apart; `whole` leaves nothing between 1 and 2.
    """
    ticker = checks.require("matplotlib.ticker", extra="report", purpose="`to_html`")
    low, high = axis.get_data_interval()
    if is_log := may_be_log and low > 0 and high / low >= _LOG_FROM:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        within = (1.0, 3.0) if high / low < 1e3 else (1.0,)
        axis.set_major_locator(ticker.LogLocator(10, within, numticks=_MAX_TICKS + 2))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        steps = (1, 2, 5, 10)
        locator = ticker.MaxNLocator(_MAX_TICKS, steps=steps, integer=whole)
        axis.set_major_locator(locator)
    if from_zero and not is_log:
        axis.axes.set(**{f"{axis.axis_name}lim": (0, axis.get_view_interval()[1])})
    low, high = sorted(axis.get_view_interval())
    values = [value for value in axis.get_majorticklocs() if low <= value <= high]
    axis.set_ticks(values, tick_labels(values, is_log=is_log))
    axis.set_label_text(name, color=SOFT, fontsize=FONT_SIZE)
    axis.grid(color=FAINT, linewidth=1)


def tick_labels(values: Sequence[float], *, is_log: bool = False) -> list[str]:
    """Returns numbers beside an axis, with as many decimals as their steps need."""
    step = min(np.diff(values), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))

    def label(value: float) -> str:
        if value and (
            abs(value) >= 1e6 or abs(value) < 1e-3 * (is_log or decimals > 4)
        ):
            mantissa, exponent = f"{value:.2e}".split("e")
            return f"{float(mantissa):g}e{int(exponent)}"
        return f"{value:,.6g}" if is_log else f"{value + 0.0:,.{decimals}f}"

    return [label(value).replace("-", "−") for value in values]


def plot_of(
    axes: Any,
    key: str,
    title: str,
    lead: str,
    summary: str,
    notes: tuple[str, ...] = (),
) -> Plot:
    """Returns the figure of some axes as an element to stand in a page.

    `key` is unlike that of any other drawing; `title` and `summary` are for screen
    readers too.
    """
    matplotlib = checks.require("matplotlib", extra="report", purpose="`to_html`")
    # Marks at an edge are whole.
    for artist in axes.findobj():
        artist.set_clip_on(False)
    buffer = io.StringIO()
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": key}):
        axes.figure.savefig(buffer, format="svg", metadata={"Date": None})
    _, _, inner = buffer.getvalue().partition("<svg")
    inner = inner.partition(">")[2]
    # Rules for the whole page, names that every drawing has, and remarks.
    inner = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", inner, flags=re.S)
    inner = re.sub(r"<!--.*?-->|<defs>\s*</defs>", "", inner, flags=re.S)
    inner = re.sub(r' id="[a-zA-Z0-9.]+_\d{1,3}"', "", inner)
    inner = re.sub(r"\s*\n\s*", "\n", inner).replace("xlink:href", "href")
    for colour, name in _VARIABLES.items():
        inner = inner.replace(f": {colour}", f": var(--{name})")
    height = 72 * axes.figure.get_figheight()
    svg = (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-labelledby="{key}-title {key}-summary">'
        f'<title id="{key}-title">{html.escape(title)}</title>'
        f'<desc id="{key}-summary">{html.escape(summary)}</desc>{inner}'
    )
    return Plot(key, title, lead, summary, svg, notes)
