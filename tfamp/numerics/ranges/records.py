"""How large the numbers of a layer are, and what formats would hold of them."""

import dataclasses
from typing import Literal

from tfamp.records.record import Record

Kind = Literal["weights", "activations", "gradients"]
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients")
LOW_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


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
