"""Draws what a plan was made from: the layers' errors, and the path of the search."""

import dataclasses
import math
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tfamp.records import checks, units

# Errors below this are drawn at it: a logarithm has no 0.
_LEAST_ERROR = 1e-6
# Layers with a name; more would cover one another.
_MOST_NAMES = 12
_MOST_LETTERS = 24
# Of the size of a font, what a letter takes on the mean, and a line.
_LETTER, _LINE = 0.6, 1.2


@dataclasses.dataclass(frozen=True)
class Look:
    """Colours as matplotlib takes them, and the size of names in points."""

    half: str = "#2f6da8"
    float32: str = "#c0392b"
    ink: str = "#333333"
    soft: str = "#555555"
    size: float = 7.0


class Mark(NamedTuple):
    """A layer in the plot."""

    path: str  # its path
    saving: float  # the part of the whole that half precision saves on it, in %
    # What half precision does to it alone; of an overflow, which has no size, ten times
    # the largest of the others.
    error: float
    is_float32: bool  # whether the plan keeps it in float32
    overflows: bool = False  # whether its error has no size


class Try(NamedTuple):
    """An evaluation in the plot."""

    number: int  # from 1
    # Paths of the layers in float32 beyond those that rules keep.
    float32: tuple[str, ...]
    worsening: float  # the mean; infinite where the plan could not run
    bound: float  # what the true worsening is below
    holds: bool  # whether that is within the tolerance
    is_fresh: bool  # whether it was made on examples that the choice had not seen
    seconds: float  # what it took

    @property
    def num_float32(self) -> int:
        """How many layers are in float32 beyond those that rules keep."""
        return len(self.float32)


def draw(
    tuning: Mapping[str, Any],
    float32: Collection[str],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws error against saving of each layer, and the evaluations one by one.

    `tuning` is what `tfamp.tune` left in the evidence of its plan, `float32` has the
    paths of the layers and operations in float32.
    """
    figure = checks.figure("`PrecisionPlan.plot`", 11.0, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    found, tries = marks(tuning, float32), evaluations(tuning)
    draw_layers(left, found, Look())
    top = "; top: overflow" if any(each.overflows for each in found) else ""
    left.set(
        yscale="log",
        xlabel="% of the whole that half precision saves",
        ylabel=f"error of the layer alone in half precision{top}",
        title="Layers",
    )
    draw_search(right, tries, float(tuning["tolerance"]), Look())
    is_fresh = any(each.is_fresh for each in tries)
    last = ", the last one on fresh examples" if is_fresh else ""
    right.set(
        xlabel=f"evaluation{last}",
        ylabel=f"worsening of {tuning['metric']}, from its mean to its bound",
        title="Search (numbers: layers in float32)",
    )
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    cost = units.format_seconds(float(tuning["seconds"]))
    reason = textwrap.shorten(str(tuning["reason"]), 150, placeholder="...")
    figure.suptitle(f"{title}\n{reason}. It took {cost}.")
    figure.draw_without_rendering()
    name_layers(left, found, Look())
    figure.savefig(path)


def marks(tuning: Mapping[str, Any], float32: Collection[str]) -> list[Mark]:
    """Returns a mark for each layer that was measured.

    Example:
        >>> layer = {"path": "a", "saving": 0.1, "forward_error": 0.5,
        ...     "backward_error": 0.0}
        >>> marks({"layers": [layer]}, ["a"])
        [Mark(path='a', saving=10.0, error=0.5, is_float32=True, overflows=False)]
    """
    chosen = set(float32)
    errors = [error_of(layer) for layer in tuning["layers"]]
    top = 10 * max((1.0, *filter(math.isfinite, errors)))
    return [
        Mark(
            layer["path"],
            100.0 * float(layer["saving"]),
            min(max(error, _LEAST_ERROR), top),
            layer["path"] in chosen,
            math.isinf(error),
        )
        for layer, error in zip(tuning["layers"], errors, strict=True)
    ]


def error_of(layer: Mapping[str, Any]) -> float:
    """Returns the larger error of a layer, of its outputs or of its gradients."""
    errors = [float(layer[name]) for name in ("forward_error", "backward_error")]
    return max((e for e in errors if not math.isnan(e)), default=0.0)


def short_path(path: str) -> str:
    """Returns a path, or its end where it is long.

    Example:
        >>> short_path("encoder/block_11/attention/query")
        '…lock_11/attention/query'
    """
    return path if len(path) <= _MOST_LETTERS else f"…{path[1 - _MOST_LETTERS :]}"


def evaluations(tuning: Mapping[str, Any]) -> list[Try]:
    """Returns the evaluations of a search in order, that on fresh examples last."""
    fresh = [tuning["confirmed"]] if tuning.get("confirmed") else []
    return [
        Try(
            number,
            tuple(each["float32"]),
            float(each["worsening"]),
            float(each["bound"]),
            bool(each["holds"]),
            number > len(tuning["evaluations"]),
            float(each.get("seconds", 0.0)),
        )
        for number, each in enumerate([*tuning["evaluations"], *fresh], 1)
    ]


def draw_layers(axes: Any, found: Sequence[Mark], look: Look) -> None:
    """Draws a mark for each layer: a circle in half precision, a square in float32."""
    for is_float32, marker, colour, label in (
        (False, "o", look.half, "half precision"),
        (True, "s", look.float32, "float32"),
    ):
        chosen = [mark for mark in found if mark.is_float32 == is_float32]
        axes.plot(
            [mark.saving for mark in chosen],
            [mark.error for mark in chosen],
            marker,
            color=colour,
            markersize=5.5,
            label=f"{len(chosen)} layers in {label}",
        )
    axes.margins(0.15, 0.15)


def name_layers(axes: Any, found: Sequence[Mark], look: Look) -> tuple[str, ...]:
    """Writes the names of layers beside their marks, as far as there is room.

    Those in float32 come first, then those with the largest errors. It has to come
    after all that moves the axes. Returns the names that are shown.
    """
    scale = 72 / axes.figure.dpi
    points = {
        mark: axes.transData.transform((mark.saving, mark.error)) * scale
        for mark in found
    }
    places: dict[tuple[int, int], list[Mark]] = {}
    for mark in sorted(found, key=lambda mark: (not mark.is_float32, -mark.error)):
        x, y = points[mark]
        places.setdefault((round(x / 4), round(y / 4)), []).append(mark)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in points.values()]
    (left, low), (right, high) = axes.bbox.get_points() * scale
    shown: list[str] = []
    for here in places.values():
        if len(shown) == _MOST_NAMES:
            break
        text = short_path(here[0].path) + (
            f" and {len(here) - 1} more" * (len(here) > 1)
        )
        width, height = _LETTER * look.size * len(text), _LINE * look.size
        x, y = points[here[0]]
        for dx, dy in (
            *((6, -height / 2), (-6 - width, -height / 2)),
            *((-width / 2, 5), (-width / 2, -5 - height)),
            *((4, 4), (4, -4 - height), (-4 - width, 4), (-4 - width, -4 - height)),
        ):
            box = (x + dx, y + dy, x + dx + width, y + dy + height)
            is_inside = (
                left <= box[0] and low <= box[1] and box[2] <= right and box[3] <= high
            )
            if is_inside and not any(_overlap(box, other) for other in taken):
                break
        else:
            continue
        taken.append(box)
        axes.annotate(
            text,
            (here[0].saving, here[0].error),
            xytext=(dx, dy + height / 2),
            textcoords="offset points",
            va="center_baseline",
            size=look.size,
            color=look.ink,
            parse_math=False,
        )
        shown.append(text)
    return tuple(shown)


def draw_search(
    axes: Any, tries: Sequence[Try], tolerance: float, look: Look
) -> list[float]:
    """Draws the evaluations: mean and bound of each, and the tolerance.

    A circle is one that holds, a cross one that does not, a triangle at the top one
    that could not run; that on fresh examples is a diamond. Returns the values beside
    the axis.
    """
    finite = [x for t in tries for x in (t.worsening, t.bound) if math.isfinite(x)]
    top = 3 * max((tolerance, *finite))
    for each in tries:
        colour = look.half if each.holds else look.float32
        mean, bound = min(each.worsening, top), min(each.bound, top)
        marker = "D" if each.is_fresh else "o" if each.holds else "x"
        if not math.isfinite(each.worsening):
            marker = "^"
        axes.plot([each.number] * 2, [mean, bound], color=colour, linewidth=2)
        axes.plot(each.number, mean, marker, color=colour, markersize=6, mew=1.5)
        axes.annotate(
            str(each.num_float32),
            (each.number, bound),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            size=look.size + 1,
            color=look.ink,
        )
    how = {"color": look.soft, "linestyle": "--", "linewidth": 1}
    axes.axhline(tolerance, label=f"tolerance {tolerance:g}", **how)
    axes.set_yscale("symlog", linthresh=tolerance)
    axes.margins(x=0.15, y=0.2)
    axes.set_xticks([each.number for each in tries])
    low, high = sorted(axes.get_ylim())
    decades = range(math.ceil(math.log10(max(high, -low, tolerance) / tolerance)) + 1)
    sizes = [0.5 * tolerance, *(tolerance * 10.0**power for power in decades)]
    values = sorted({0.0, *sizes, *(-size for size in sizes)})
    values = [value for value in values if low <= value <= high]
    axes.set_yticks(values, [f"{value:g}".replace("-", "−") for value in values])
    axes.minorticks_off()
    return values


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
