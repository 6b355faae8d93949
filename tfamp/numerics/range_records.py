"""What `tfamp.ranges` found: a record, a table, a plot."""

import dataclasses
import math
import os
from typing import Any, Literal

from tfamp.records import checks, console
from tfamp.records.formats import FLOAT16, FORMATS
from tfamp.records.record import Record, TableRecord

Kind = Literal["weights", "activations", "gradients"]
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients")
LOW_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


_COLOURS = {"weights": "#4c78a8", "activations": "#54a24b", "gradients": "#e45756"}
# Inches for a layer, and of the whole at least and at most.
_PER_ROW, _LEAST, _MOST = 0.28, 3.0, 60.0
_LOWEST, _HIGHEST = -60, 40


@dataclasses.dataclass(frozen=True)
class Fit(Record):
    """What a format would do to some numbers; parts of those that are finite and not 0.

    Args:
        format: Name of the format.
        overflow: Part that would become inf or NaN.
        zero: Part that would become 0.
        coarse: Part that would keep fewer digits than the format has, being below its
            smallest normal number.
    """

    format: str
    overflow: float
    zero: float
    coarse: float

    @property
    def total(self) -> float:
        """Part that would be spoiled in any of these ways."""
        return self.overflow + self.zero + self.coarse


@dataclasses.dataclass(frozen=True)
class LayerRange(Record):
    """The numbers of one kind in one layer.

    Args:
        path: The layer, or the operation of a Functional graph.
        class_name: Its class.
        kind: "weights", "activations" are its outputs, "gradients" those of the loss by
            its outputs and weights, without a loss scale.
        count: How many numbers were seen.
        zeros: How many of them are 0.
        nonfinite: How many of them are inf or NaN.
        smallest: The smallest magnitude that is not 0; inf if there is none.
        largest: The largest finite magnitude.
        exponents: How many lie in [2**e, 2**(e+1)), by e as text.
        fits: What each format would do to them.
    """

    path: str
    class_name: str
    kind: Kind
    count: int
    zeros: int
    nonfinite: int
    smallest: float
    largest: float
    exponents: dict[str, int] = dataclasses.field(hash=False)
    fits: tuple[Fit, ...]

    def fit(self, format: str) -> Fit:
        """Returns what a format would do to them.

        Raises:
            ValueError: The format is none of the four that were looked at.
        """
        for fit in self.fits:
            if fit.format == format:
                return fit
        names = tuple(fit.format for fit in self.fits)
        raise ValueError(
            f"`format` is {format!r}; expected one of {names!r}. float32 held them all."
        )


@dataclasses.dataclass(frozen=True)
class Ranges(TableRecord):
    """How large the numbers of a model are in float32, layer by layer.

    Args:
        model: The model's name.
        num_batches: Batches that were looked at.
        layers: A record for each layer and kind, in the order of the layers.
        best_loss_scale: The power of two that gradients fit float16 best with.
        loss_scales: The smallest and the largest power of two that are as good.
        lost_gradients: Part of the gradients that are not 0 and that float16 would
            spoil, at scale 1 and at the best one.
    """

    model: str
    num_batches: int
    layers: tuple[LayerRange, ...]
    best_loss_scale: float
    loss_scales: tuple[float, float]
    lost_gradients: tuple[float, float]

    def of(self, kind: Kind) -> tuple[LayerRange, ...]:
        """Returns the layers' records of one kind."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def table(self) -> str:
        """Returns a table of at most 110 columns, a line for each layer and kind."""
        title = (
            f"{self.model}: magnitudes in float32 over {self.num_batches} batches; "
            "what formats would spoil (overflow / to zero / few digits)"
        )
        rows = []
        for layer in self.layers:
            fits = [
                " / ".join(map(_share, (fit.overflow, fit.zero, fit.coarse)))
                if fit.total
                else "·"
                for fit in layer.fits
            ]
            row = (
                layer.path,
                layer.kind,
                _magnitude(layer.smallest),
                _magnitude(layer.largest),
            )
            rows.append((*row, *fits))
        right = {**console.FOLD, "justify": "right"}
        columns = {
            "layer": console.FOLD,
            "kind": console.WHOLE,
            "smallest": console.RIGHT,
            "largest": console.RIGHT,
            **{name.removesuffix("fn"): right for name in LOW_FORMATS},
        }
        low, high = self.loss_scales
        before, after = self.lost_gradients
        return console.text_of(
            console.table(columns, rows, title=title),
            "Gradients fit float16 best with a loss scale of "
            f"{self.best_loss_scale:g} (from {low:g} to {high:g}): {after:.2%} of "
            f"them are spoiled, without one {before:.2%}. float16 holds "
            f"{FLOAT16.smallest_subnormal:.0e} to {FLOAT16.max:.0f}.",
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the magnitudes of each layer against the limits of each format.

        A row for each layer and kind shows how many numbers have which exponent.

        Args:
            path: An image file, whose ending says its kind, such as "ranges.png".

        Raises:
            ImportError: matplotlib is not installed.
        """
        height = min(max(_LEAST, 1.8 + _PER_ROW * len(self.layers)), _MOST)
        figure = checks.figure("`Ranges.plot`", 10.0, height)
        axes = figure.subplots()
        exponents = [int(e) for layer in self.layers for e in layer.exponents] or [0]
        low = min(min(exponents), math.floor(math.log2(FLOAT16.smallest_subnormal))) - 2
        high = max(max(exponents), math.ceil(math.log2(FLOAT16.max))) + 2
        low, high = max(low, _LOWEST), min(high, _HIGHEST)
        for row, layer in enumerate(self.layers):
            counts = {int(exponent): n for exponent, n in layer.exponents.items()}
            most = max(counts.values(), default=1)
            # Rare numbers are what overflows: even one of a million is to be seen.
            heights = [0.15 + 0.7 * n / most for n in counts.values()]
            axes.bar(
                [exponent + 0.5 for exponent in counts],
                heights,
                bottom=[row + 0.4 - height for height in heights],
                width=0.9,
                color=_COLOURS[layer.kind],
                linewidth=0,
            )
        for name, line in zip(LOW_FORMATS, ("-", "--", "-.", ":"), strict=True):
            label = name.removesuffix("fn")
            style: dict[str, Any] = {"color": "#555555", "linewidth": 1.0}
            for limit in (FORMATS[name].smallest_subnormal, FORMATS[name].max):
                exponent = math.log2(limit)
                if low < exponent < high:
                    axes.axvline(exponent, label=label, linestyle=line, **style)
                    label = "_"  # one entry of the legend each
        axes.set_xlim(low, high)
        axes.set_ylim(len(self.layers) - 0.4, -0.6)
        names = [f"{layer.path}  {layer.kind}" for layer in self.layers]
        axes.set_yticks(range(len(self.layers)), names, fontsize="small")
        axes.set_xlabel(
            "magnitude, as a power of 2; lines: smallest and largest number"
        )
        best = f"2^{math.log2(self.best_loss_scale):.0f}"
        title = f"{self.model}: magnitudes in float32, best loss scale {best}"
        axes.set_title(title, loc="left")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", fontsize="small")
        figure.savefig(path, dpi=150)


def _magnitude(magnitude: float) -> str:
    return f"{magnitude:.1e}" if 0 < magnitude < math.inf else "-"


def _share(part: float) -> str:
    if part == 0:
        return "·"
    return f"{part:.1%}" if part >= 0.001 else "<0.1%"
