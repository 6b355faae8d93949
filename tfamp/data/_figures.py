"""What one pass over rows learns: counts, range, moments, and a random sample."""

import numpy as np

# Values looked at in one go: what stays in a core's cache is several times faster.
_BLOCK_VALUES = 2**17


class Numbers:
    """Counts, range and moments of features, chunk by chunk.

    Figures are arrays with an entry a feature; `mean`, `std`, `low` and `high` are of
    finite values. Blocks are merged about the mean of each, so a mean of 1e8 beside a
    deviation of 1 costs no digits.

    Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for
        Computing Sample Variances, 1979, equation 2.1.
    """

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        zeros = np.zeros(num_features, np.int64)
        self.count = self.num_nan = self.num_infinite = self.num_finite = zeros
        self.low = np.full(num_features, np.inf)
        self.high = np.full(num_features, -np.inf)
        self.is_integral = np.ones(num_features, bool)
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
        step = max(1, _BLOCK_VALUES // self.num_features)
        for start in range(0, len(rows), step):
            block = np.ascontiguousarray(rows[start : start + step].T, np.float64)
            self._add_block(block)

    def look(self, values: np.ndarray) -> None:
        """Sees each block, for more figures in the same pass: (features, rows).

        They are float64, with 0 for NaN and inf.
        """

    def _add_block(self, values: np.ndarray) -> None:
        held = np.isfinite(values)
        finite = held.sum(axis=1)
        self.count = self.count + values.shape[1]
        if not held.all():
            nan = np.isnan(values).sum(axis=1)
            self.num_nan = self.num_nan + nan
            self.num_infinite = self.num_infinite + values.shape[1] - finite - nan
        low = np.where(held, values, np.inf).min(axis=1)
        high = np.where(held, values, -np.inf).max(axis=1)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        values = np.where(held, values, 0.0)
        self.is_integral &= (values == np.floor(values)).all(axis=1)
        # Divided first, as their sum may overflow.
        mean = (values / np.maximum(finite, 1)[:, None]).sum(axis=1)
        with np.errstate(over="ignore"):
            squares = np.where(held, (values - mean[:, None]) ** 2, 0.0).sum(axis=1)
            share = finite / np.maximum(self.num_finite + finite, 1)
            # The square of a large mean is inf, and 0 times inf would be NaN.
            weight = self.num_finite * share
            between = np.where(weight > 0, mean - self.mean, 0.0) ** 2 * weight
            self._squares = self._squares + squares + between
        self.mean = self.mean + (mean - self.mean) * share
        self.num_finite = self.num_finite + finite
        self.look(values)


class RowSample:
    """Keeps at most `size` rows of a stream, each row with the same probability.

    Every row draws a random key and the smallest keys stay. The same chunks give the
    same rows.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.random = np.random.default_rng(0)
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._largest, self._held = 1.0, 0

    def add(self, rows: np.ndarray) -> None:
        """Takes the next rows."""
        keys = self.random.random(len(rows))
        chosen = np.flatnonzero(keys < self._largest)
        self._keys.append(keys[chosen])
        self._rows.append(rows[chosen])
        self._held += len(chosen)
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
