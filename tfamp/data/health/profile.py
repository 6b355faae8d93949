"""What one pass over a column learns: range, moments, rounding, a sample.

A column is cut into features: entries of the last axis of vectors, sequences and
images of few channels. All figures are arrays with one entry for each feature.
"""

from typing import Any

import numpy as np

from tfamp.data.health.examples import Column
from tfamp.data.health.rounding import Rounding
from tfamp.data.health.sample import RowSample

# Wider vectors, and images with more channels, are looked at as one feature.
_MAX_FEATURES = 2048
_MAX_CHANNELS = 16
# A sample this large finds a drift of 0.1 with near certainty (see `drift`), and
# all features of a column together hold at most 32 MiB of them.
_SAMPLE_ROWS = 20_000
_SAMPLE_VALUES = 4 * 2**20
_MIN_SAMPLE_ROWS = 1000
# Rounding noise against the standard deviation: from 1/20 on, a layer sees it.
# Normalized data has 2e-4 in float16 and 2e-3 in bfloat16.
NOISY = 0.05
# Values looked at in one go: what stays in a core's cache is several times faster.
_BLOCK_VALUES = 2**17


class Profile:
    """Gathers the figures of one column, chunk by chunk.

    Attributes:
        column: Which column.
        num_features: Number of features, 1 where it is looked at as a whole.
        num_rows: Examples seen.
        count: Values seen, NaN and inf among them.
        num_nan: NaN values.
        num_infinite: Values that are inf or -inf.
        low: Smallest finite value, inf if there is none; exact Python integers
            for integer columns.
        high: Largest finite value, -inf if there is none; likewise.
        mean: Mean of the finite values.
        num_overflows: Finite values that the compute dtype turns into inf.
        num_flushed: Non-zero values that it turns into 0.
        num_subnormal: Values that it holds with fewer bits than others.
        num_nonzero: Finite values other than 0.
    """

    def __init__(self, column: Column, rounding: Rounding, *, seed: int) -> None:
        self.column = column
        self.rounding = rounding
        self.num_features = num_features(column)
        self.num_rows = 0
        zeros = np.zeros(self.num_features, np.int64)
        self.count, self.num_nan, self.num_infinite = zeros, zeros, zeros
        self.num_overflows, self.num_flushed, self.num_subnormal = zeros, zeros, zeros
        self.num_nonzero = zeros
        self.low: Any = np.full(self.num_features, np.inf, object)
        self.high: Any = np.full(self.num_features, -np.inf, object)
        self.mean = np.zeros(self.num_features)
        self.is_integral = np.ones(self.num_features, bool)
        self._finite = np.zeros(self.num_features, np.int64)
        self._squares = np.zeros(self.num_features)
        self._rounded = np.zeros(self.num_features, np.int64)
        self._errors = np.zeros(self.num_features)
        share = _SAMPLE_VALUES // self.num_features
        size = max(_MIN_SAMPLE_ROWS, min(_SAMPLE_ROWS, share))
        self._values = RowSample(size, seed)
        self._means = RowSample(size, seed)

    @property
    def variance(self) -> np.ndarray:
        """Variance of the finite values, of the whole population.

        Exactly 0 where all are equal, which a mean in float64 may miss.
        """
        varies = self.low != self.high
        return np.where(varies, self._squares / np.maximum(self._finite, 1), 0.0)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the finite values."""
        return np.sqrt(self.variance)

    @property
    def rms(self) -> np.ndarray:
        """Root of the mean square of the finite values."""
        return np.sqrt(self.variance + self.mean**2)

    @property
    def num_finite(self) -> np.ndarray:
        """Values that are neither NaN nor inf."""
        return self._finite

    @property
    def rounding_error(self) -> np.ndarray:
        """Root of the mean square error of rounding, without what overflows."""
        return np.sqrt(self._errors / np.maximum(self._rounded, 1))

    @property
    def noise(self) -> np.ndarray:
        """The rounding error against the standard deviation, 0 where nothing varies."""
        std = self.std
        varies = (std > 0) & np.isfinite(std)
        return np.where(varies, self.rounding_error / np.where(varies, std, 1.0), 0.0)

    @property
    def sample(self) -> np.ndarray:
        """One value of each sampled example, shape (rows, features)."""
        return self._values.rows()

    @property
    def example_means(self) -> np.ndarray:
        """The mean over each sampled example, shape (rows, features)."""
        means = self._means.rows()
        return means if means.size else self.sample

    def update(self, chunk: np.ndarray) -> None:
        """Takes the next examples, shape (rows, ...)."""
        self.num_rows += len(chunk)
        if self.column.is_text:
            self.count = self.count + chunk.size
            self._sample(chunk.reshape(len(chunk), -1, 1))
            return
        if not chunk.size:
            return
        cut = chunk.reshape(len(chunk), -1, self.num_features)
        self._sample(cut)
        step = max(1, _BLOCK_VALUES // max(1, cut[0].size))
        for start in range(0, len(cut), step):
            self._look(cut[start : start + step])

    def _sample(self, cut: np.ndarray) -> None:
        """Keeps some rows: one value of each, and its mean if it has several."""
        if not cut.shape[1]:
            return
        chosen = self._values.choose(len(cut))
        positions = self._values.positions(len(chosen), cut.shape[1])
        self._values.add(cut[chosen, positions])
        if cut.shape[1] > 1 and not self.column.is_text:
            chosen = self._means.choose(len(cut))
            self._means.add(_mean_of_finite(cut[chosen]))

    def _look(self, cut: np.ndarray) -> None:
        """Adds a block of values to every figure."""
        if cut.dtype.itemsize == 1 and cut.dtype.kind in "uib":
            self._look_at_bytes(cut.reshape(-1, self.num_features))
            return
        native = np.ascontiguousarray(cut.reshape(-1, self.num_features).T)
        if native.dtype.kind in "iub":
            low, high = native.min(axis=1), native.max(axis=1)
            self._widen([int(v) for v in low], [int(v) for v in high])
            values = native.astype(np.float64)
            finite = np.full(self.num_features, values.shape[1])
            # NumPy's own abs of the smallest int64 is negative.
            exact = max(-int(low.min()), int(high.max())) <= self.rounding.max_integer
            mask = None
        else:
            values = native.astype(np.float64)
            exact = False
            values, finite, mask = self._without_non_finite(values)
        self.count = self.count + values.shape[1]
        number = np.maximum(finite, 1)
        # The mean of a block that nearly overflows float64 stays finite this way.
        mean = (values / number[:, None]).sum(axis=1)
        deviations = values - mean[:, None]
        if mask is not None:
            deviations = np.where(mask, deviations, 0.0)
        with np.errstate(over="ignore"):
            squares = (deviations * deviations).sum(axis=1)
        self._merge_moments(finite, mean, squares)
        nonzero = values != 0
        self.num_nonzero = self.num_nonzero + nonzero.sum(axis=1)
        if exact:
            self._rounded = self._rounded + finite
        else:
            self._round(values, nonzero, finite)

    def _without_non_finite(
        self, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Counts NaN and inf, puts 0 in their place and finds the range."""
        mask = np.isfinite(values)
        finite = mask.sum(axis=1)
        if finite.sum() == values.size:
            self._widen(values.min(axis=1).tolist(), values.max(axis=1).tolist())
            mask = None
        else:
            nan = np.isnan(values).sum(axis=1)
            self.num_nan = self.num_nan + nan
            self.num_infinite = self.num_infinite + values.shape[1] - finite - nan
            low = np.where(mask, values, np.inf).min(axis=1)
            high = np.where(mask, values, -np.inf).max(axis=1)
            self._widen(low.tolist(), high.tolist())
            values = np.where(mask, values, 0.0)
        if self.is_integral.any():
            self.is_integral &= (values == np.floor(values)).all(axis=1)
        return values, finite, mask

    def _widen(self, low: list[Any], high: list[Any]) -> None:
        # Python's numbers, since an int64 does not fit a float64.
        for i, (smallest, largest) in enumerate(zip(low, high, strict=True)):
            self.low[i] = min(self.low[i], smallest)
            self.high[i] = max(self.high[i], largest)

    def _look_at_bytes(self, rows: np.ndarray) -> None:
        """Does the same for 8-bit numbers, which every compute dtype holds exactly.

        By counting each of the 256 values: ten times as fast, and images are bytes.
        """
        lowest = -128 if rows.dtype.kind == "i" else 0
        first = np.arange(self.num_features) * 256 - lowest
        histogram = np.bincount(
            (rows + first).ravel(), minlength=256 * self.num_features
        ).reshape(self.num_features, 256)
        numbers = np.arange(256) + lowest
        seen = histogram > 0
        self._widen(
            [int(n) for n in numbers[seen.argmax(axis=1)]],
            [int(n) for n in numbers[255 - seen[:, ::-1].argmax(axis=1)]],
        )
        count = np.full(self.num_features, len(rows))
        mean = histogram @ numbers / len(rows)
        squares = (histogram * (numbers - mean[:, None]) ** 2).sum(axis=1)
        self._merge_moments(count, mean, squares)
        self.count = self.count + count
        self.num_nonzero = self.num_nonzero + count - histogram[:, -lowest]
        self._rounded = self._rounded + count

    def _merge_moments(
        self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray
    ) -> None:
        """Merges count, mean and sum of squared deviations of a block.

        Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm
        for computing sample variances, 1979, equation 2.1.
        """
        total = np.maximum(self._finite + count, 1)
        shift = mean - self.mean
        with np.errstate(over="ignore"):
            weight = self._finite * (count / total)
            # The square of a large mean is inf, and 0 times inf would be NaN.
            between = np.where(weight > 0, shift, 0.0) ** 2 * weight
            self._squares = self._squares + squares + between
        self.mean = self.mean + shift * (count / total)
        self._finite = self._finite + count

    def _round(
        self, values: np.ndarray, nonzero: np.ndarray, finite: np.ndarray
    ) -> None:
        """Counts what the compute dtype does to the values."""
        rounded = self.rounding(values)
        overflows = np.isinf(rounded)
        num_overflows = overflows.sum(axis=1)
        self.num_overflows = self.num_overflows + num_overflows
        flushed = nonzero & (rounded == 0)
        self.num_flushed = self.num_flushed + flushed.sum(axis=1)
        tiny = nonzero & (np.abs(values) < self.rounding.format.smallest_normal)
        self.num_subnormal = self.num_subnormal + (tiny & ~flushed).sum(axis=1)
        errors = rounded - values
        if num_overflows.any():
            errors = np.where(overflows, 0.0, errors)
        self._errors = self._errors + (errors * errors).sum(axis=1)
        self._rounded = self._rounded + finite - num_overflows


def _mean_of_finite(rows: np.ndarray) -> np.ndarray:
    """Returns the mean over the positions of each row, NaN where none is finite."""
    means = rows.mean(axis=1, dtype=np.float64)
    if rows.dtype.kind in "iub" or np.isfinite(means).all():
        return means
    values = rows.astype(np.float64)
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0.0).sum(axis=1) / finite.sum(axis=1)


def num_features(column: Column) -> int:
    """Returns how many features a column is cut into.

    Example:
        >>> num_features(Column("x", "input", "float32", (30,)))
        30
        >>> num_features(Column("x", "input", "float32", (28, 28, 1)))
        1
        >>> num_features(Column("x", "input", "float32", (None, None)))
        1
    """
    shape = column.shape
    if column.is_text or not shape or shape[-1] is None:
        return 1
    limit = _MAX_CHANNELS if len(shape) > 2 else _MAX_FEATURES
    return max(1, shape[-1]) if shape[-1] <= limit else 1
