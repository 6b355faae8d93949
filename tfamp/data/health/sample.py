"""A uniform random sample of rows of a stream, of a fixed size."""

import numpy as np


class RowSample:
    """Keeps `size` rows of a stream; each row is kept with the same probability.

    Every row draws a random key and the smallest keys stay, so chunks of any size
    give a sample without replacement, and few rows are touched once it is full.

    Args:
        size: Rows to keep at most.
        seed: Same seed and chunks, same rows.

    Example:
        >>> sample = RowSample(2, seed=0)
        >>> chosen = sample.choose(5)
        >>> sample.add(np.arange(5)[chosen])
        >>> len(sample.rows())
        2
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._pending = np.empty(0)
        self._largest = 1.0
        self._held = 0

    def choose(self, num_rows: int) -> np.ndarray:
        """Returns which of the next rows to pass to `add`."""
        keys = self._rng.random(num_rows)
        chosen = np.flatnonzero(keys < self._largest)
        if len(chosen) > self._size:
            chosen = np.sort(np.argpartition(keys, self._size)[: self._size])
        self._pending = keys[chosen]
        return chosen

    def positions(self, num_rows: int, num_positions: int) -> np.ndarray:
        """Returns a random position within each of so many rows."""
        return self._rng.integers(num_positions, size=num_rows)

    def add(self, rows: np.ndarray) -> None:
        """Takes the rows that `choose` asked for."""
        self._keys.append(self._pending)
        self._rows.append(rows)
        self._held += len(rows)
        # Twice the size before it is cut, so that cutting is rare.
        if self._held > 2 * self._size:
            self._cut()

    def rows(self) -> np.ndarray:
        """Returns the sample, in the order of the stream."""
        if not self._rows:
            return np.empty(0)
        self._cut()
        return self._rows[0]

    def _cut(self) -> None:
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        if len(keys) > self._size:
            kept = np.sort(np.argpartition(keys, self._size)[: self._size])
            keys, rows = keys[kept], rows[kept]
            self._largest = float(keys.max())
        self._keys, self._rows, self._held = [keys], [rows], len(keys)
