"""Draws what a plan was made from: the layers' errors, and the path of the search."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tfamp.records import checks, units

_FLOAT32, _HALF, _LIMIT = "#c0392b", "#2f6da8", "#555555"
# Errors below this are drawn at it: a logarithm has no 0.
_LEAST_ERROR = 1e-6
_MOST_NAMES = 12


def draw(
    tuning: Mapping[str, Any],
    kept: Mapping[str, str],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Draws error against saving of each layer, and the evaluations one by one.

    Args:
        tuning: What `tfamp.tune` left in the evidence of its plan.
        kept: Layers and operations in float32, with what decided.
        title: Above the picture.
        path: An image file, whose ending says its kind.
    """
    figures = checks.require(
        "matplotlib.figure", extra="report", purpose="`PrecisionPlan.plot`"
    )
    # Without pyplot, which keeps figures and picks a display.
    figure = figures.Figure(figsize=(11.0, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_layers(left, tuning["layers"], kept)
    _draw_search(right, tuning)
    cost = units.format_seconds(float(tuning["seconds"]))
    figure.suptitle(f"{title}\n{_short(str(tuning['reason']))}. It took {cost}.")
    figure.savefig(path)


def _draw_layers(
    axes: Any, layers: Sequence[Mapping[str, Any]], kept: Mapping[str, str]
) -> None:
    points = [
        (
            100.0 * float(layer["saving"]),
            _error(layer),
            layer["path"],
            layer["path"] in kept,
        )
        for layer in layers
    ]
    for is_kept, colour, label in (
        (False, _HALF, "half precision"),
        (True, _FLOAT32, "float32"),
    ):
        chosen = [point for point in points if point[3] == is_kept]
        axes.scatter(
            [point[0] for point in chosen],
            [point[1] for point in chosen],
            s=28,
            color=colour,
            marker="s" if is_kept else "o",
            label=f"{len(chosen)} layers in {label}",
        )
    places: dict[tuple[float, float], list[str]] = {}
    for saving, error, name, _ in sorted(points, key=lambda point: -point[1]):
        place = round(saving, 1), round(math.log10(error), 1)
        places.setdefault(place, []).append(name)
    for (saving, error), names in list(places.items())[:_MOST_NAMES]:
        text = ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
        axes.annotate(
            text, (saving, 10**error), xytext=(5, 4), textcoords="offset points", size=7
        )
    axes.set(
        yscale="log",
        xlabel="% of the whole that half precision saves",
        ylabel="error of the layer alone in half precision",
        title="Layers",
    )
    axes.margins(0.15, 0.15)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0.0, 0.9))


def _error(layer: Mapping[str, Any]) -> float:
    errors = [float(layer[name]) for name in ("forward_error", "backward_error")]
    found = max((e for e in errors if not math.isnan(e)), default=0.0)
    return min(max(found, _LEAST_ERROR), 1e6)


def _draw_search(axes: Any, tuning: Mapping[str, Any]) -> None:
    tried = [*tuning["evaluations"]]
    if tuning.get("confirmed"):
        tried.append(tuning["confirmed"])
    numbers = range(1, len(tried) + 1)
    for number, each in zip(numbers, tried, strict=True):
        colour = _HALF if each["holds"] else _FLOAT32
        mean, bound = _bounded(each["worsening"]), _bounded(each["bound"])
        axes.plot([number, number], [mean, bound], color=colour, linewidth=2)
        axes.plot(number, mean, "o", color=colour, markersize=5)
        axes.annotate(
            f"{len(each['float32'])}",
            (number, bound),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            size=8,
        )
    axes.axhline(float(tuning["tolerance"]), color=_LIMIT, linestyle="--", linewidth=1)
    axes.annotate(
        f" tolerance {float(tuning['tolerance']):g}",
        (0.0, float(tuning["tolerance"])),
        xycoords=("axes fraction", "data"),
        va="bottom",
        size=8,
    )
    axes.set(
        xlabel="evaluation, the last one on fresh examples",
        ylabel=f"worsening of {tuning['metric']}: mean to bound",
        title="Search (numbers: layers in float32)",
    )
    axes.set_yscale("symlog", linthresh=float(tuning["tolerance"]))
    axes.set_xticks(list(numbers))
    axes.margins(x=0.15, y=0.2)


def _bounded(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else 1e3


def _short(text: str) -> str:
    return text if len(text) < 150 else f"{text[:147]}..."
