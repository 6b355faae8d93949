"""What `tfamp.ranges` found: a record, a table, a plot."""

import dataclasses
import math
import os

from tfamp.numerics.ranges.records import LOW_FORMATS, Kind, LayerRange
from tfamp.records import console
from tfamp.records.formats import FLOAT16
from tfamp.records.record import TableRecord


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
            row = (layer.path, layer.kind, shown(layer.smallest), shown(layer.largest))
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

        Args:
            path: An image file, whose ending says its kind, such as "ranges.png".

        Raises:
            ImportError: matplotlib is not installed.
        """
        # Here, so that who draws nothing needs no matplotlib.
        from tfamp.numerics.ranges.plot import plot

        title = (
            f"{self.model}: magnitudes in float32, best loss scale "
            f"2^{math.log2(self.best_loss_scale):.0f}"
        )
        plot(self.layers, title, path)


def shown(magnitude: float) -> str:
    """Returns a magnitude in three characters of digits, "-" for none.

    Example:
        >>> shown(65504.0), shown(3.1e-9), shown(float("inf")), shown(0.0)
        ('6.6e+04', '3.1e-09', '-', '-')
    """
    return f"{magnitude:.1e}" if 0 < magnitude < math.inf else "-"


def _share(part: float) -> str:
    if part == 0:
        return "·"
    return f"{part:.1%}" if part >= 0.001 else "<0.1%"
