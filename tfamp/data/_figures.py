"""What one pass over rows learns: counts, range, moments, and a random sample."""

import numpy as np

# Values looked at in one go: what stays in a core's cache is several times faster.
_BLOCK_VALUES = 2**17


class Numbers:
    """Counts, range and moments of features, chunk by chunk.

    Means and squares are merged block by block, about the mean of each block, so a mean
    of 1e8 beside a deviation of 1 costs no digits.

    Attributes:
        num_features: How many features are looked at side by side.
        count: Values seen; as all that follows an array with an entry a feature.
        num_nan, num_infinite, num_finite: Values that are NaN, inf or -inf, neither.
        num_nonzero: Finite values other than 0.
        mean: Of the finite values, 0 where there is none.
        low, high: Smallest and largest finite value, inf and -inf if there is none;
            exact Python integers for integers.
        is_integral: Whether all finite values are whole numbers.
        histogram: Of 8-bit numbers how often each of the 256 occurs, shape
            (features, 256); None for others.

    Example:
        >>> numbers = Numbers(1)
        >>> numbers.add(np.array([[1e8], [np.nan], [1e8 + 2], [1e8 + 4]]))
        >>> numbers.num_finite.tolist(), numbers.mean.tolist()
        ([3], [100000002.0])

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, 1979, equation 2.1.
    """

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        zeros = np.zeros(num_features, np.int64)
        self.count = self.num_nan = self.num_infinite = zeros
        self.num_finite = self.num_nonzero = zeros
        self.low = np.full(num_features, np.inf)
        self.high = np.full(num_features, -np.inf)
        self.is_integral = np.ones(num_features, bool)
        self.histogram: np.ndarray | None = None
        self.mean = self._squares = np.zeros(num_features)

    @property
    def variance(self) -> np.ndarray:
        """Variance of the finite values, of the population; 0 if all are equal."""
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

    def look(
        self,
        native: np.ndarray,
        values: np.ndarray,
        nonzero: np.ndarray,
        finite: np.ndarray,
    ) -> None:
        """Sees each block after it is counted, for more figures in the same pass.

        Of shape (features, rows) come the values as they are, the same in float64 with
        0 for NaN and inf, and which are not 0; then how many of each are finite.
        """

    def _add_block(self, native: np.ndarray) -> None:
        """Adds values of shape (features, rows) to every figure."""
        values = native.astype(np.float64)
        held = np.isfinite(values)
        finite = held.sum(axis=1)
        if native.dtype.kind in "iu":
            # Python's integers, since an int64 does not fit a float64.
            ends = native.min(axis=1).astype(object), native.max(axis=1).astype(object)
        else:
            nan = np.isnan(values).sum(axis=1)
            self.num_nan = self.num_nan + nan
            self.num_infinite = self.num_infinite + values.shape[1] - finite - nan
            ends = (
                np.where(held, values, np.inf).min(axis=1),
                np.where(held, values, -np.inf).max(axis=1),
            )
            values = np.where(held, values, 0.0)
            self.is_integral &= (values == np.floor(values)).all(axis=1)
        self._widen(*ends)
        self.count = self.count + values.shape[1]
        # Divided first, as their sum may overflow.
        mean = (values / np.maximum(finite, 1)[:, None]).sum(axis=1)
        with np.errstate(over="ignore"):
            squares = np.where(held, (values - mean[:, None]) ** 2, 0.0).sum(axis=1)
        self._merge(finite, mean, squares)
        nonzero = values != 0
        self.num_nonzero = self.num_nonzero + nonzero.sum(axis=1)
        self.look(native, values, nonzero, finite)

    def _widen(self, low: np.ndarray, high: np.ndarray) -> None:
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    def _add_bytes(self, rows: np.ndarray) -> None:
        """Does the same by counting each of 256 values: ten times as fast on images."""
        lowest = -128 if rows.dtype.kind == "i" else 0
        columns = rows.view(np.uint8).T
        counts = np.stack([np.bincount(one, minlength=256) for one in columns])
        # As unsigned numbers the negative ones come behind the others.
        histogram = np.roll(counts, -lowest, axis=1)
        numbers = np.arange(256) + lowest
        seen = histogram > 0
        low, high = seen.argmax(axis=1), 255 - seen[:, ::-1].argmax(axis=1)
        self._widen(numbers[low].astype(object), numbers[high].astype(object))
        count = np.full(self.num_features, len(rows))
        mean = histogram @ numbers / len(rows)
        squares = (histogram * (numbers - mean[:, None]) ** 2).sum(axis=1)
        self._merge(count, mean, squares)
        self.count = self.count + count
        self.num_nonzero = self.num_nonzero + count - histogram[:, -lowest]
        self.histogram = histogram + (0 if self.histogram is None else self.histogram)

    def _merge(self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        """Merges count, mean and sum of squared deviations of a block."""
        share = count / np.maximum(self.num_finite + count, 1)
        delta = mean - self.mean
        with np.errstate(over="ignore"):
            weight = self.num_finite * share
            # The square of a large mean is inf, and 0 times inf would be NaN.
            between = np.where(weight > 0, delta, 0.0) ** 2 * weight
            self._squares = self._squares + squares + between
        self.mean = self.mean + delta * share
        self.num_finite = self.num_finite + count


class RowSample:
    """Keeps at most `size` rows of a stream, each row with the same probability.

    Every row draws a random key and the smallest keys stay. The same seed and chunks
    give the same rows.

    Example:
        >>> sample = RowSample(2, seed=0)
        >>> chosen = sample.choose(5)
        >>> sample.add(np.arange(5)[chosen])
        >>> len(sample.rows())
        2
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self.random = np.random.default_rng(seed)
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._pending = np.empty(0)
        self._largest = 1.0
        self._held = 0

    def choose(self, num_rows: int) -> np.ndarray:
        """Returns which of the next rows to pass to `add`."""
        keys = self.random.random(num_rows)
        chosen = np.flatnonzero(keys < self._largest)
        if len(chosen) > self._size:
            chosen = np.sort(np.argpartition(keys, self._size)[: self._size])
        self._pending = keys[chosen]
        return chosen

    def add(self, rows: np.ndarray) -> None:
        """Takes the rows that `choose` asked for."""
        self._keys.append(self._pending)
        self._rows.append(rows)
        self._held += len(rows)
        # Twice the size before it is cut, so that cutting is rare.
        if self._held > 2 * self._size:
            self.rows()

    def rows(self) -> np.ndarray:
        """Returns the sample, in the order of the stream."""
        if not self._rows:
            return np.empty(0)
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        if len(keys) > self._size:
            kept = np.sort(np.argpartition(keys, self._size)[: self._size])
            keys, rows = keys[kept], rows[kept]
            self._largest = float(keys.max())
        self._keys, self._rows, self._held = [keys], [rows], len(keys)
        return rows


def quantile(values: np.ndarray, weights: np.ndarray, q: float) -> float:
    """Returns the smallest of the ascending values with the fraction `q` at or below.

    Example:
        >>> values, weights = np.array([1.0, 5.0]), np.array([3, 1])
        >>> quantile(values, weights, 0.75), quantile(values, weights, 0.76)
        (1.0, 5.0)
    """
    upto = np.cumsum(weights)
    # 0.1 * 10 times over must not ask for rank 3.0000000000000004.
    rank = q * upto[-1] * (1 - 2**-50)
    return float(values[min(np.searchsorted(upto, rank), len(values) - 1)])


def thin(
    values: np.ndarray, weights: np.ndarray, max_values: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `max_values` of ascending values, each standing for as many.

    Example:
        >>> thin(np.array([1.0, 2.0, 3.0]), np.array([2, 1, 1]), 2)
        (array([1., 2.]), array([2, 2]))
    """
    if len(values) <= max_values:
        return values, weights
    edges = np.linspace(0, weights.sum(), max_values + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    chosen = values[np.searchsorted(np.cumsum(weights), middle)]
    share = np.diff(np.round(edges).astype(np.int64))
    values, first = np.unique(chosen, return_index=True)
    return values, np.add.reduceat(share, first)
