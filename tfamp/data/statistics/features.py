"""Records of what was counted: a feature, a column of numbers, a column of text."""

import dataclasses
from typing import Any

import numpy as np

from tfamp.data._figures import quantile
from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class Feature(Record):
    """What the values of one feature are like.

    All but `missing` and `infinite` is about the finite values alone.

    Args:
        name: The column's name, with a position in it where the column has several
            features: "age", "x[3]".
        count: Finite values.
        missing: NaN, and what was declared to stand for a missing value.
        infinite: inf and -inf.
        zeros: Values equal to 0.
        mean: Their mean.
        variance: Their variance, divided by the count (as Keras and NumPy do).
        min: The smallest.
        max: The largest.
        mode: The most frequent value, the smallest of several; None where it is
            open: no value occurs twice, or none leads in the sample by more than
            chance.
        mode_count: How often it occurs; an estimate where `distinct` is None.
        distinct: How many values differ; None where a sample stands for all rows.
        values: Values in ascending order that stand for all.
        weights: How many each stands for.
        rank_error: By how much the rank of a quantile may be off, as a fraction of
            `count`, with a probability of 99.9 %; 0 where quantiles are exact.
    """

    name: str
    count: int
    missing: int
    infinite: int
    zeros: int
    mean: float
    variance: float
    min: float
    max: float
    mode: float | None
    mode_count: int | None
    distinct: int | None
    values: tuple[float, ...] = dataclasses.field(repr=False)
    weights: tuple[int, ...] = dataclasses.field(repr=False)
    rank_error: float

    @property
    def std(self) -> float:
        """Standard deviation."""
        return float(np.sqrt(self.variance))

    @property
    def median(self) -> float:
        """The smallest value with half of the values at or below it."""
        return self.quantile(0.5)

    @property
    def is_constant(self) -> bool:
        """Whether all finite values are equal."""
        return self.min == self.max

    def quantile(self, q: float) -> float:
        """Returns the smallest value with the fraction `q` at or below it.

        It is one of the values, never a mean of two (NumPy's "inverted_cdf").

        Raises:
            ValueError: `q` is not in [0, 1].
        """
        if not 0 <= q <= 1:
            raise ValueError(
                f"`q` is {q!r}; expected a fraction in [0, 1]. Pass 0.5 for the median."
            )
        if q in (0, 1):
            return self.max if q else self.min
        return quantile(*self.weighted_values(), q)

    def weighted_values(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values that stand for all, and how many each stands for."""
        return np.array(self.values), np.array(self.weights, np.int64)


@dataclasses.dataclass(frozen=True)
class Column(Record):
    """A column of numbers.

    Args:
        name: Its key in the dict of inputs; "x" where inputs are one tensor.
        dtype: Of its tensors, such as "float32".
        scalar: Whether an example has one value, without an axis.
        missing_values: Numbers that stand for a missing value, besides NaN.
        features: One for each entry of the last axis.
    """

    name: str
    dtype: str
    scalar: bool
    missing_values: tuple[float, ...]
    features: tuple[Feature, ...]

    def array(self, field: str) -> Any:
        """Returns a field of all features as an array `(features,)`.

        Of a scalar column it is one number. `field` is any attribute of `Feature`;
        a mode that is open is NaN.
        """
        found = [getattr(feature, field) for feature in self.features]
        values = np.array([np.nan if value is None else value for value in found])
        return values[0].item() if self.scalar else values

    def quantile(self, q: float) -> Any:
        """Returns the quantile of each feature, `(features,)`, or one number."""
        values = np.array([feature.quantile(q) for feature in self.features])
        return values[0].item() if self.scalar else values


@dataclasses.dataclass(frozen=True)
class TextColumn(Record):
    """A column of strings; entries of a vector are counted together.

    Args:
        name: Its key in the dict of inputs; "x" where inputs are one tensor.
        scalar: Whether an example has one value, without an axis.
        missing_values: Texts that stand for a missing value.
        count: Values that are not missing.
        missing: Values that are.
        distinct: How many values differ; None where a sample stands for all rows.
        values: The values, the most frequent first, at most 10,000; bytes that are no
            UTF-8 are written with backslashes.
        counts: How often each occurs.
        count_error: By how much a count may be off, with a probability of 99.9 %; 0
            where counts are exact.
        mode: The most frequent value, None where it is open.
    """

    name: str
    scalar: bool
    missing_values: tuple[str, ...]
    count: int
    missing: int
    distinct: int | None
    values: tuple[str, ...] = dataclasses.field(repr=False)
    counts: tuple[int, ...] = dataclasses.field(repr=False)
    count_error: int
    mode: str | None

    def vocabulary(self, max_size: int | None = None) -> list[str]:
        """Returns the most frequent values, as `keras.layers.StringLookup` takes."""
        return list(self.values[:max_size])
