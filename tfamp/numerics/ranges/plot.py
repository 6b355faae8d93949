"""Draws the magnitudes of each layer against the limits of each format."""

import math
import os
from collections.abc import Sequence
from typing import Any

from tfamp.numerics.ranges.records import KINDS, LayerRange
from tfamp.records import checks
from tfamp.records.formats import FORMATS

_COLOURS = {"weights": "#4c78a8", "activations": "#54a24b", "gradients": "#e45756"}
_SHOWN = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Inches for a layer, and of the whole at least and at most.
_PER_ROW, _LEAST, _MOST = 0.28, 3.0, 60.0
_LOWEST, _HIGHEST = -60, 40


def plot(
    layers: Sequence[LayerRange], title: str, path: str | os.PathLike[str]
) -> None:
    """Draws a row for each layer and kind: how many numbers have which exponent.

    Args:
        layers: What was measured.
        title: What stands above.
        path: An image file; its ending says its kind.

    Raises:
        ImportError: matplotlib is not installed.
    """
    checks.require("matplotlib", extra="report", purpose="`Ranges.plot`")
    from matplotlib.figure import Figure

    rows = [
        layer
        for path_ in dict.fromkeys(layer.path for layer in layers)
        for kind in KINDS
        for layer in layers
        if (layer.path, layer.kind) == (path_, kind)
    ]
    height = min(max(_LEAST, 1.8 + _PER_ROW * len(rows)), _MOST)
    # Without pyplot, which keeps figures and picks a display.
    figure = Figure(figsize=(10.0, height), layout="constrained")
    axes = figure.subplots()
    low, high = _limits(rows)
    for number, layer in enumerate(rows):
        _draw(axes, number, layer)
    for at, name in enumerate(_SHOWN):
        format = FORMATS[name]
        style: dict[str, Any] = {
            "color": "#555555",
            "linewidth": 1.0,
            "linestyle": _LINES[at],
        }
        label = name.removesuffix("fn")
        for limit in (format.smallest_subnormal, format.max):
            exponent = math.log2(limit)
            if low < exponent < high:
                axes.axvline(exponent, label=label, **style)
                label = "_"  # one entry of the legend each
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [f"{layer.path}  {layer.kind}" for layer in rows], fontsize="small"
    )
    axes.set_xlabel("magnitude, as a power of 2; lines: smallest and largest number")
    axes.set_title(title, loc="left")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=150)


_LINES = ("-", "--", "-.", ":")


def _limits(rows: list[LayerRange]) -> tuple[int, int]:
    """Returns the powers of 2 to show: all that there are, within reason."""
    exponents = [int(e) for layer in rows for e in layer.exponents] or [0]
    half = FORMATS["float16"]
    low = min(min(exponents), math.floor(math.log2(half.smallest_subnormal))) - 2
    high = max(max(exponents), math.ceil(math.log2(half.max))) + 2
    return max(low, _LOWEST), min(high, _HIGHEST)


def _draw(axes: Any, row: int, layer: LayerRange) -> None:
    """Draws the histogram of one row as boxes whose height is the share."""
    counts = {int(exponent): n for exponent, n in layer.exponents.items()}
    most = max(counts.values(), default=1)
    axes.bar(
        [exponent + 0.5 for exponent in counts],
        # Rare numbers are what overflows: even one of a million is to be seen.
        [0.15 + 0.7 * n / most for n in counts.values()],
        bottom=[row + 0.4 - 0.15 - 0.7 * n / most for n in counts.values()],
        width=0.9,
        color=_COLOURS[layer.kind],
        linewidth=0,
    )
