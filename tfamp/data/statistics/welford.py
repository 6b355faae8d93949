"""Mean and variance in one pass, in float64, whatever the size of the mean."""

import numpy as np


class Moments:
    """Count, mean and variance of features, merged chunk by chunk.

    Values are first shifted by the first one of their feature. A mean of 1e8 beside
    a standard deviation of 1 then costs no digits: the shift lies within
    sqrt(count) standard deviations of the mean, since it is one of the values, so
    rounding stays below sqrt(count) * 2**-53 of one.

    Args:
        num_features: How many features are counted side by side.

    Example:
        >>> moments = Moments(1)
        >>> moments.add(np.array([[1e8], [1e8 + 2]]))
        >>> moments.add(np.array([[np.nan], [1e8 + 4]]))
        >>> moments.count.tolist(), moments.mean.tolist()
        ([3], [100000002.0])
        >>> round(float(moments.variance[0]), 12)
        2.666666666667

    Source: Welford, Note on a Method for Calculating Corrected Sums of Squares and
        Products, 1962; merging: Chan, Golub and LeVeque, Updating Formulae and a
        Pairwise Algorithm for Computing Sample Variances, 1979, equation 2.1.
    """

    def __init__(self, num_features: int) -> None:
        self.count = np.zeros(num_features, np.int64)
        self._shift = np.zeros(num_features)
        self._mean = np.zeros(num_features)
        self._squares = np.zeros(num_features)

    @property
    def mean(self) -> np.ndarray:
        """Mean of each feature, NaN where there is no value."""
        return np.where(self.count > 0, self._shift + self._mean, np.nan)

    @property
    def variance(self) -> np.ndarray:
        """Variance (divided by the count) of each feature, NaN without values."""
        safe = np.maximum(self.count, 1)
        return np.where(self.count > 0, self._squares / safe, np.nan)

    def add(self, values: np.ndarray) -> None:
        """Merges a chunk.

        Args:
            values: float64 `(rows, features)`; NaN stands for no value, and no value
                is infinite.
        """
        if not len(values):
            return
        present = ~np.isnan(values)
        count = present.sum(axis=0)
        first = values[present.argmax(axis=0), np.arange(values.shape[1])]
        self._shift = np.where((self.count == 0) & (count > 0), first, self._shift)
        shifted = np.where(present, values - self._shift, 0.0)
        safe = np.maximum(count, 1)
        mean = shifted.sum(axis=0) / safe
        around = np.where(present, shifted - mean, 0.0)
        # The second term takes back what rounding left in the mean.
        squares = (around * around).sum(axis=0) - around.sum(axis=0) ** 2 / safe
        self._merge(count, mean, squares)

    def add_counted(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Merges values that occur several times.

        Args:
            values: float64 `(values,)`, the same for every feature.
            counts: int64 `(features, values)`, how often each occurs.
        """
        count = counts.sum(axis=1)
        first = values[(counts > 0).argmax(axis=1)]
        self._shift = np.where((self.count == 0) & (count > 0), first, self._shift)
        shifted = values[None, :] - self._shift[:, None]
        safe = np.maximum(count, 1)
        mean = (shifted * counts).sum(axis=1) / safe
        squares = (counts * (shifted - mean[:, None]) ** 2).sum(axis=1)
        self._merge(count, mean, squares)

    def _merge(self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        """Merges the moments of a chunk, taken around the shift."""
        total = self.count + count
        safe = np.maximum(total, 1)
        delta = mean - self._mean
        between = delta**2 * (self.count * (count / safe))
        self._squares = self._squares + squares + between
        self._mean = self._mean + delta * (count / safe)
        self.count = total
