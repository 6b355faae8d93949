"""Parts of a drawing as SVG text; every word that goes in is escaped.

Colours are classes and never values, so that one style sheet turns them to light,
dark or paper.
"""

import dataclasses
import html
import math

# A drawing's own width: legible on a phone, three of them beside one another on a desk.
WIDTH = 360
# Of a letter of the smallest size, in the sans-serif fonts of usual systems.
LETTER = 6.2


@dataclasses.dataclass(frozen=True)
class Plot:
    """One drawing with what goes around it.

    Args:
        key: Its name in the page.
        title: Heading.
        lead: What the axes and marks are, in a line.
        summary: What one would see, for those who do not.
        svg: The drawing.
        notes: What it does not show, one sentence each.
    """

    key: str
    title: str
    lead: str
    summary: str
    svg: str
    notes: tuple[str, ...] = ()


def element(tag: str, *children: str, **attributes: float | str) -> str:
    """Returns an element; children are SVG already, attributes are escaped.

    Args:
        tag: Its name.
        *children: What it holds.
        **attributes: `class_` is "class", "_" is "-", numbers are cut to tenths.

    Example:
        >>> element("line", x1=0.12, stroke_width=2, class_="<a>")
        '<line x1="0.1" stroke-width="2" class="&lt;a&gt;"/>'
    """
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
    )
    inner = "".join(children)
    return f"<{tag}{pairs}>{inner}</{tag}>" if inner else f"<{tag}{pairs}/>"


def text(
    x: float, y: float, content: str, *, anchor: str = "start", class_: str = "tick"
) -> str:
    """Returns a line of text; "2^15" is written as a power."""
    base, _, power = content.partition("^")
    inner = html.escape(base)
    if base.isdecimal() and power:
        # Fonts draw their own raised figures too small to be read here.
        inner += element("tspan", html.escape(power), dy=-4, class_="power")
    return element("text", inner, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """Returns a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def bar(x1: float, x2: float, y: float, height: float, class_: str) -> str:
    """Returns a bar around the height `y`, one unit wide at least."""
    left, right = min(x1, x2), max(x1, x2)
    width = max(right - left, 1.0)
    return element(
        "rect", x=left, y=y - height / 2, width=width, height=height, class_=class_
    )


def dot(x: float, y: float, radius: float, class_: str, tip: str) -> str:
    """Returns a dot that says what it is when one points at it."""
    title = element("title", html.escape(tip))
    return element("circle", title, cx=x, cy=y, r=radius, class_=class_)


def path(points: list[tuple[float, float]], class_: str, *, close: bool = False) -> str:
    """Returns a line through points; one that is not finite leaves a gap."""
    commands, is_down = [], False
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            commands.append(f"{'L' if is_down else 'M'}{_number(x)} {_number(y)}")
            is_down = True
        else:
            is_down = False
    end = "Z" if close and commands else ""
    return element("path", d="".join(commands) + end, class_=class_)


def drawing(height: float, summary: str, *parts: str) -> str:
    """Returns the whole drawing."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {_number(height)}",
        role="img",
        aria_label=summary,
        class_="plot",
    )


def _attribute(value: float | str) -> str:
    return html.escape(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> str:
    """Returns a coordinate to a tenth: finer than any screen, and short."""
    cut = f"{value:.1f}"
    return cut.removesuffix(".0") if cut != "-0.0" else "0"
