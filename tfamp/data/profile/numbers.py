"""What one pass over numbers learns: counts, range and moments, feature by feature."""

import numpy as np

# Values looked at in one go: what stays in a core's cache is several times faster.
_BLOCK_VALUES = 2**17
# So many features of bytes are counted one by one, more of them in one go.
_FEW_FEATURES = 16
# Beyond, a difference of two values may overflow float64.
_MAX_SHIFT = 1e300


class Numbers:
    """Counts, range and moments of features, chunk by chunk.

    Values are first shifted by the first one of their feature. A mean of 1e8 beside
    a standard deviation of 1 then costs no digits: the shift lies within
    sqrt(count) standard deviations of the mean, since it is one of the values, so
    rounding stays below sqrt(count) * 2**-53 of one.

    Args:
        num_features: How many features are looked at side by side.

    Attributes:
        num_features: Likewise.
        count: Values seen, NaN and inf among them; as all that follows an array with
            one entry for each feature.
        num_nan: NaN values.
        num_infinite: Values that are inf or -inf.
        num_finite: Values that are neither.
        num_nonzero: Finite values other than 0.
        low: Smallest finite value, inf if there is none; exact Python integers for
            integers.
        high: Largest finite value, -inf if there is none; likewise.
        is_integral: Whether all finite values are whole numbers.
        histogram: Of 8-bit numbers how often each of the 256 occurs, shape
            (features, 256); None for others.

    Example:
        >>> numbers = Numbers(1)
        >>> numbers.add(np.array([[1e8], [1e8 + 2]]))
        >>> numbers.add(np.array([[np.nan], [1e8 + 4]]))
        >>> numbers.num_finite.tolist(), numbers.mean.tolist()
        ([3], [100000002.0])
        >>> round(float(numbers.variance[0]), 12)
        2.666666666667

    Source: Welford, Note on a Method for Calculating Corrected Sums of Squares and
        Products, 1962; merging: Chan, Golub and LeVeque, Updating Formulae and a
        Pairwise Algorithm for Computing Sample Variances, 1979, equation 2.1.
    """

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        zeros = np.zeros(num_features, np.int64)
        self.count, self.num_nan, self.num_infinite = zeros, zeros, zeros
        self.num_finite, self.num_nonzero = zeros, zeros
        self.low = np.full(num_features, np.inf)
        self.high = np.full(num_features, -np.inf)
        self.is_integral = np.ones(num_features, bool)
        self.histogram: np.ndarray | None = None
        self._shift = np.zeros(num_features)
        self._mean = np.zeros(num_features)
        self._squares = np.zeros(num_features)

    @property
    def mean(self) -> np.ndarray:
        """Mean of the finite values, 0 where there is none."""
        return self._shift + self._mean

    @property
    def variance(self) -> np.ndarray:
        """Variance of the finite values, of the whole population.

        Exactly 0 where all are equal, which a mean in float64 may miss.
        """
        varies = self.low != self.high
        return np.where(varies, self._squares / np.maximum(self.num_finite, 1), 0.0)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the finite values."""
        return np.sqrt(self.variance)

    def add(self, rows: np.ndarray) -> None:
        """Takes the next values, shape (rows, features), in their own dtype."""
        if rows.dtype.itemsize == 1 and rows.dtype.kind in "uib":
            if len(rows):
                self._add_bytes(rows)
            return
        step = max(1, _BLOCK_VALUES // self.num_features)
        for start in range(0, len(rows), step):
            self._add_block(np.ascontiguousarray(rows[start : start + step].T))

    def _add_block(self, native: np.ndarray) -> None:
        """Adds values of shape (features, rows) to every figure."""
        values = native.astype(np.float64)
        finite, mask = np.full(self.num_features, values.shape[1]), None
        if native.dtype.kind in "iu":
            # Python's integers, since an int64 does not fit a float64.
            low, high = native.min(axis=1), native.max(axis=1)
            self._widen(low.astype(object), high.astype(object))
        else:
            values, finite, mask = self._without_non_finite(values)
        self.count = self.count + values.shape[1]
        self._add_moments(values, finite, mask)
        nonzero = values != 0
        self.num_nonzero = self.num_nonzero + nonzero.sum(axis=1)
        self._look(native, values, nonzero, finite)

    def _look(
        self,
        native: np.ndarray,
        values: np.ndarray,
        nonzero: np.ndarray,
        finite: np.ndarray,
    ) -> None:
        """Sees each block after it is counted; for more figures in the same pass.

        Args:
            native: The values in their own dtype, shape (features, rows).
            values: In float64, 0 in the place of NaN and inf.
            nonzero: Which are finite and not 0.
            finite: How many of each feature are finite.
        """

    def _without_non_finite(
        self, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Counts NaN and inf, puts 0 in their place and finds the range."""
        mask = np.isfinite(values)
        finite = mask.sum(axis=1)
        if finite.sum() == values.size:
            self._widen(values.min(axis=1), values.max(axis=1))
            mask = None
        else:
            nan = np.isnan(values).sum(axis=1)
            self.num_nan = self.num_nan + nan
            self.num_infinite = self.num_infinite + values.shape[1] - finite - nan
            self._widen(
                np.where(mask, values, np.inf).min(axis=1),
                np.where(mask, values, -np.inf).max(axis=1),
            )
            values = np.where(mask, values, 0.0)
        if self.is_integral.any():
            self.is_integral &= (values == np.floor(values)).all(axis=1)
        return values, finite, mask

    def _widen(self, low: np.ndarray, high: np.ndarray) -> None:
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    def _add_moments(
        self, values: np.ndarray, finite: np.ndarray, mask: np.ndarray | None
    ) -> None:
        """Merges the moments of a block, taken around the shift."""
        is_new = (self.num_finite == 0) & (finite > 0)
        if is_new.any():
            first = 0 if mask is None else mask.argmax(axis=1)
            firsts = values[np.arange(self.num_features), first]
            usable = is_new & (np.abs(firsts) < _MAX_SHIFT)
            self._shift = np.where(usable, firsts, self._shift)
        shifted = values - self._shift[:, None]
        if mask is not None:
            shifted = np.where(mask, shifted, 0.0)
        number = np.maximum(finite, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = shifted.sum(axis=1) / number
        if not np.isfinite(mean).all():  # the sum has overflown float64
            mean = (shifted / number[:, None]).sum(axis=1)
        deviations = shifted - mean[:, None]
        if mask is not None:
            deviations = np.where(mask, deviations, 0.0)
        with np.errstate(over="ignore"):
            squares = (deviations * deviations).sum(axis=1)
        self._merge(finite, mean, squares)

    def _add_bytes(self, rows: np.ndarray) -> None:
        """Does the same for 8-bit numbers by counting each of the 256 values.

        That is ten times as fast, and images are bytes.
        """
        lowest = -128 if rows.dtype.kind == "i" else 0
        if self.num_features <= _FEW_FEATURES:
            columns = rows.view(np.uint8).T
            counts = np.stack([np.bincount(one, minlength=256) for one in columns])
            # As unsigned numbers the negative ones come behind the others.
            histogram = np.roll(counts, -lowest, axis=1)
        else:
            first = np.arange(self.num_features) * 256 - lowest
            places = (rows + first).ravel()
            histogram = np.bincount(places, minlength=256 * self.num_features)
            histogram = histogram.reshape(self.num_features, 256)
        numbers = np.arange(256) + lowest
        seen = histogram > 0
        low = numbers[seen.argmax(axis=1)]
        high = numbers[255 - seen[:, ::-1].argmax(axis=1)]
        self._widen(low.astype(object), high.astype(object))
        count = np.full(self.num_features, len(rows))
        mean = histogram @ numbers / len(rows)
        squares = (histogram * (numbers - mean[:, None]) ** 2).sum(axis=1)
        self._merge(count, mean, squares)
        self.count = self.count + count
        self.num_nonzero = self.num_nonzero + count - histogram[:, -lowest]
        self.histogram = histogram + (0 if self.histogram is None else self.histogram)

    def _merge(self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        """Merges count, mean and sum of squared deviations of a block."""
        total = np.maximum(self.num_finite + count, 1)
        delta = mean - self._mean
        with np.errstate(over="ignore"):
            weight = self.num_finite * (count / total)
            # The square of a large mean is inf, and 0 times inf would be NaN.
            between = np.where(weight > 0, delta, 0.0) ** 2 * weight
            self._squares = self._squares + squares + between
        self._mean = self._mean + delta * (count / total)
        self.num_finite = self.num_finite + count
