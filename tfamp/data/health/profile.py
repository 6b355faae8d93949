"""What `check` learns of a column: range, moments, rounding, a sample.

A column is cut into features: entries of the last axis of vectors, sequences and
images of few channels. All figures are arrays with one entry for each feature.
"""

import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._examples import Column
from tfamp.data._figures import Numbers, RowSample
from tfamp.records import checks
from tfamp.records.findings import Finding, Fix, Severity
from tfamp.records.formats import FORMATS, Format

# Wider vectors, and images with more channels, are looked at as one feature.
_MAX_FEATURES = 2048
_MAX_CHANNELS = 16
# A sample this large finds a drift of 0.1 with near certainty, and all features of a
# column together hold at most 32 MiB of them.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS, _SAMPLE_VALUES = 20_000, 1000, 4 * 2**20
# Rounding noise against the standard deviation: from 1/20 on, a layer sees it.
# Normalized data has 2e-4 in float16 and 2e-3 in bfloat16.
NOISY = 0.05
# Integers above this are no rows of an embedding table: it would have more
# parameters than the largest ones in use.
_MAX_INDEX = 2**27
# Integers are taken for ids when they fill their range this densely.
_DENSE = 0.5
_ID_NAME = re.compile(r"(^|[_/\W])(id|ids|index|idx|key|code|zip|zipcode)$", re.I)
# With values so many deviations away, all others would end up next to 0.
_MAX_STANDARDIZED = 100.0
_POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A compute dtype by its format, and what its layers get of a number.

    Example:
        >>> Rounding(FORMATS["float16"])(np.array([2049.0, 1e5, 1e-9])).tolist()
        [2048.0, inf, 0.0]
    """

    format: Format

    @property
    def name(self) -> str:
        """The compute dtype."""
        return self.format.name

    @property
    def max_integer(self) -> int:
        """Up to here, in both directions, every integer is held exactly."""
        return 2 ** (self.format.mantissa_bits + 1)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Returns values rounded to the compute dtype, in float64.

        By way of float32, which is what `fit` and Keras's inputs make of float64 and
        of integers first.
        """
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            single = values.astype(np.float32)
            dtype = tf.as_dtype(self.name).as_numpy_dtype
            return single.astype(dtype).astype(np.float64)


def rounding_for(compute_dtype: Any) -> Rounding:
    """Returns the rounding of a dtype, a policy's name or a `keras.DTypePolicy`."""
    name = getattr(compute_dtype, "compute_dtype", compute_dtype)
    options = ("float32", "float16", "bfloat16", *_POLICIES)
    name = checks.choice("compute_dtype", name, options)
    return Rounding(FORMATS[_POLICIES.get(name, name)])


class Profile(Numbers):
    """Gathers the figures of one column, chunk by chunk.

    Attributes:
        column: Which column; it has 1 feature where it is looked at as a whole.
        num_rows: Examples seen.
        num_overflows: Finite values that the compute dtype turns into inf.
        num_flushed: Non-zero values that it turns into 0.
    """

    def __init__(self, column: Column, rounding: Rounding) -> None:
        super().__init__(num_features(column))
        self.column, self.rounding = column, rounding
        self.num_rows = 0
        zeros = np.zeros(self.num_features, np.int64)
        self.num_overflows = self.num_flushed = self._rounded = zeros
        self._errors = np.zeros(self.num_features)
        share = _SAMPLE_VALUES // self.num_features
        size = max(_MIN_SAMPLE_ROWS, min(_SAMPLE_ROWS, share))
        self._values, self._means = RowSample(size, 0), RowSample(size, 0)

    @property
    def rms(self) -> np.ndarray:
        """Root of the mean square of the finite values."""
        return np.sqrt(self.variance + self.mean**2)

    @property
    def noise(self) -> np.ndarray:
        """The rounding error against the standard deviation, 0 where nothing varies.

        It is the root of the mean square error of rounding, without what overflows.
        """
        error, std = np.sqrt(self._errors / np.maximum(self._rounded, 1)), self.std
        varies = (std > 0) & np.isfinite(std)
        return np.where(varies, error / np.where(varies, std, 1.0), 0.0)

    @property
    def largest(self) -> np.ndarray:
        """The largest magnitude; exact Python integers for integers."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    @property
    def sample(self) -> np.ndarray:
        """One value of each sampled example, shape (rows, features)."""
        return self._values.rows()

    @property
    def example_means(self) -> np.ndarray:
        """The mean over each sampled example, shape (rows, features)."""
        means = self._means.rows()
        return means if means.size else self.sample

    @property
    def may_be_index(self) -> bool:
        """Whether it can be rows of an embedding table or codes of categories."""
        is_integer = self.column.is_integer
        return is_integer and min(self.low) >= 0 and max(self.high) <= _MAX_INDEX

    def place(self, feature: int) -> str:
        """Returns the name of one feature: "x[3]", or the column's own."""
        name = self.column.name
        return name if self.num_features == 1 else f"{name}[{feature}]"

    def merged_share(self, feature: int) -> float:
        """Returns the share of neighbouring distinct values that rounding makes equal.

        Values that become inf are left out: they are the overflow's.
        """
        rounded = self.rounding(np.unique(finite(self.sample[:, feature])))
        rounded = rounded[np.isfinite(rounded)]
        equal = np.count_nonzero(rounded[1:] == rounded[:-1])
        return equal / max(1, len(rounded) - 1)

    def looks_like_ids(self, feature: int) -> bool:
        """Whether whole numbers fill their range as ids do, or are called so.

        Drawn from a range of R ids, s values hold R (1 - exp(-s / R)) distinct ones.
        """
        if not (self.is_integral[feature] and self.num_finite[feature]):
            return False
        if _ID_NAME.search(self.column.name):
            return True
        span = self.high[feature] - self.low[feature] + 1
        if span > 2 * self.num_rows:
            return False
        expected = span * -np.expm1(-len(self.sample) / span)
        distinct = np.unique(finite(self.sample[:, feature]))
        return len(distinct) >= _DENSE * float(expected)

    def update(self, chunk: np.ndarray) -> None:
        """Takes the next examples, shape (rows, ...)."""
        self.num_rows += len(chunk)
        if self.column.is_text:
            self.count = self.count + chunk.size
            self._sample(chunk.reshape(len(chunk), -1, 1))
        elif chunk.size:
            cut = chunk.reshape(len(chunk), -1, self.num_features)
            self._sample(cut)
            self.add(cut.reshape(-1, self.num_features))

    def _sample(self, cut: np.ndarray) -> None:
        """Keeps some rows: one value of each, and its mean if it has several."""
        if not cut.shape[1]:
            return
        chosen = self._values.choose(len(cut))
        positions = self._values.random.integers(cut.shape[1], size=len(chosen))
        self._values.add(cut[chosen, positions])
        if cut.shape[1] > 1 and not self.column.is_text:
            rows = cut[self._means.choose(len(cut))]
            held = np.isfinite(rows)
            with np.errstate(invalid="ignore"):
                totals = rows.sum(axis=1, dtype=np.float64, where=held)
                self._means.add(totals / held.sum(axis=1))

    def _add_bytes(self, rows: np.ndarray) -> None:
        """Takes 8-bit numbers, which every compute dtype holds exactly."""
        super()._add_bytes(rows)
        self._rounded = self._rounded + len(rows)

    def look(
        self,
        native: np.ndarray,
        values: np.ndarray,
        nonzero: np.ndarray,
        finite: np.ndarray,
    ) -> None:
        """Counts what the compute dtype does to a block of values."""
        if native.dtype.kind in "iu":
            # NumPy's own abs of the smallest int64 is negative.
            largest = max(-int(native.min()), int(native.max()))
            if largest <= self.rounding.max_integer:
                self._rounded = self._rounded + finite
                return
        rounded = self.rounding(values)
        overflows = np.isinf(rounded)
        num_overflows = overflows.sum(axis=1)
        self.num_overflows = self.num_overflows + num_overflows
        flushed = nonzero & (rounded == 0)
        self.num_flushed = self.num_flushed + flushed.sum(axis=1)
        errors = np.where(overflows, 0.0, rounded - values)
        self._errors = self._errors + (errors * errors).sum(axis=1)
        self._rounded = self._rounded + finite - num_overflows


def finite(values: np.ndarray) -> np.ndarray:
    """Returns the values that are neither NaN nor inf, integers in their own dtype."""
    if values.dtype.kind in "iub":
        return values
    values = values.astype(np.float64)
    return values[np.isfinite(values)]


def num_features(column: Column) -> int:
    """Returns how many features a column is cut into.

    Example:
        >>> shapes = ((30,), (28, 28, 1), (None, None))
        >>> [num_features(Column("x", "input", "float32", s)) for s in shapes]
        [30, 1, 1]
    """
    shape = column.shape
    if column.is_text or not shape or shape[-1] is None:
        return 1
    limit = _MAX_CHANNELS if len(shape) > 2 else _MAX_FEATURES
    return max(1, shape[-1]) if shape[-1] <= limit else 1


class Hits:
    """The features of a column that a rule fires for; false if there are none.

    The highest `score` is the worst of them, whose figures go into the message.
    """

    def __init__(self, profile: Profile, mask: np.ndarray, score: np.ndarray) -> None:
        self._profile, self._number = profile, int(mask.sum())
        comparable = np.where(mask, np.nan_to_num(score, posinf=1e308), -np.inf)
        self.worst = int(np.argmax(comparable))

    def __bool__(self) -> bool:
        """Whether the rule fires."""
        return self._number > 0

    def finding(
        self,
        rule: str,
        severity: Severity,
        message: str,
        remedy: str,
        figure: float,
        fix: Fix | None = None,
    ) -> Finding:
        """Returns the finding, whose message begins with the worst feature.

        It is on that feature if it is the only one, else on the column.
        """
        column = name = self._profile.place(self.worst)
        if self._number > 1:
            column, all_features = self._profile.column.name, self._profile.num_features
            name = f"{name} (worst of {self._number} of {all_features} features)"
        return Finding(
            rule,
            severity,
            f"{name} {message}",
            remedy,
            column=column,
            figure=float(figure),
            details={"num_features": self._number},
            fix=fix,
        )


def standardizing(profile: Profile) -> Fix | None:
    """Returns the fix that takes mean and standard deviation out of an input column.

    None where that does not help, or would turn codes of categories into numbers.
    """
    column = profile.column
    if column.role != "input" or column.is_text or profile.may_be_index:
        return None
    if any(profile.looks_like_ids(i) for i in range(profile.num_features)):
        return None
    mean, std = profile.mean, np.where(profile.std > 0, profile.std, 1.0)
    low, high = profile.low.astype(float), profile.high.astype(float)
    usable = np.isfinite(profile.std).all() and (profile.num_finite > 0).all()
    distance = np.maximum(high - mean, mean - low)
    if not usable or (distance / std).max() > _MAX_STANDARDIZED:
        return None
    return Fix(
        column.name,
        "standardize",
        "float32",
        "subtracted in float64, before anything rounds; serve with the same numbers",
        tuple(mean.tolist()),
        tuple(std.tolist()),
    )
