"""What is kept of a column while its values stream by."""

import numpy as np

from tfamp.data.statistics.counts import MAX_DISTINCT, Counts
from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.data.statistics.missing import is_missing
from tfamp.data.statistics.sketch import RANK_ERROR, QuantileSketch, thin
from tfamp.data.statistics.welford import Moments

# Values of a column that wait to be sorted together: 32 MiB in float64.
_BUFFER_VALUES = 2**22
_MIN_BUFFER_ROWS, _MAX_BUFFER_ROWS = 2**11, 2**16
# Values of a long stream whose frequency is followed, to find its mode.
_MAX_FREQUENT = 1_000
# Of a record; a column with many features keeps fewer of each.
_RECORD_VALUES = 400_000
_MIN_RECORD_VALUES = 2_000


class Distribution:
    """The distribution of one feature: a table of all values, or a sketch.

    Up to 10,000 distinct values are counted one by one, so quantiles and mode are
    exact. With more, the table moves into a `QuantileSketch` and a `Counts`.

    Args:
        max_distinct: Size of the table.
    """

    def __init__(self, max_distinct: int = MAX_DISTINCT) -> None:
        self._max_distinct = max_distinct
        self._values = np.empty(0)
        self._weights = np.empty(0, np.int64)
        self._sketch: QuantileSketch | None = None
        self._frequent = Counts(_MAX_FREQUENT)

    def add(self, values: np.ndarray) -> None:
        """Adds finite float64 values `(values,)`."""
        distinct, counts = np.unique(values, return_counts=True)
        if self._sketch is not None:
            self._sketch.add(values)
            self._frequent.add_counted(distinct, counts)
        else:
            self.add_counted(distinct, counts)

    def add_counted(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Adds values that occur several times to the table."""
        values = np.concatenate([self._values, values])
        self._values, inverse = np.unique(values, return_inverse=True)
        self._weights = np.bincount(
            inverse,
            np.concatenate([self._weights, counts]),
            minlength=len(self._values),
        ).astype(np.int64)
        if len(self._values) > self._max_distinct:
            self._sketch = QuantileSketch()
            self._sketch.add_counted(self._values, self._weights)
            self._frequent.add_counted(self._values, self._weights)

    def distinct(self) -> int | None:
        """Returns how many values differ, None where there are too many."""
        return None if self._sketch else len(self._values)

    def mode(self) -> tuple[float, int] | None:
        """Returns the most frequent value and its count, None if that's open."""
        if self._sketch is not None:
            return self._frequent.mode()
        # Of equal counts `argmax` takes the first, the smallest value.
        place = int(self._weights.argmax())
        if self._weights[place] == 1 and len(self._values) > 1:
            return None
        return float(self._values[place]), int(self._weights[place])

    def summary(self, max_values: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns values, what each stands for, and the rank error of quantiles."""
        if self._sketch is None:
            values, weights, error = self._values, self._weights, 0.0
        else:
            values, weights = self._sketch.weighted_values()
            error = RANK_ERROR
        if len(values) <= max_values:
            return *thin(values, weights, max_values), error
        return *thin(values, weights, max_values), error + 0.5 / max_values


class NumberColumn:
    """Streams a column of numbers.

    Args:
        name: Of the column.
        num_features: Length of its last axis.
        dtype: NumPy dtype of its values.
        missing_values: Numbers that stand for a missing value, besides NaN.
    """

    def __init__(
        self,
        name: str,
        num_features: int,
        dtype: np.dtype,
        missing_values: tuple[float, ...],
    ) -> None:
        self._name, self._dtype = name, dtype
        self._missing_values = missing_values
        self._moments = Moments(num_features)
        self._missing = np.zeros(num_features, np.int64)
        self._infinite = np.zeros(num_features, np.int64)
        self._zeros = np.zeros(num_features, np.int64)
        self._min = np.full(num_features, np.inf)
        self._max = np.full(num_features, -np.inf)
        self._distributions = [Distribution() for _ in range(num_features)]
        self._buffer: list[np.ndarray] = []
        rows = _BUFFER_VALUES // num_features
        self._buffer_rows = int(np.clip(rows, _MIN_BUFFER_ROWS, _MAX_BUFFER_ROWS))

    def add(self, values: np.ndarray) -> None:
        """Adds values `(..., features)` in the column's own dtype."""
        values = values.reshape(-1, len(self._missing))
        if self._dtype.itemsize == 1 and self._dtype.kind in "iub":
            self._add_bytes(values)
            return
        absent = is_missing(values, self._missing_values)
        self._missing += absent.sum(axis=0)
        numbers = np.where(absent, np.nan, values.astype(np.float64))
        infinite = np.isinf(numbers)
        self._infinite += infinite.sum(axis=0)
        if infinite.any():
            numbers[infinite] = np.nan
        self._moments.add(numbers)
        self._zeros += (numbers == 0).sum(axis=0)
        if len(numbers):
            self._min = np.fmin(self._min, np.fmin.reduce(numbers, axis=0))
            self._max = np.fmax(self._max, np.fmax.reduce(numbers, axis=0))
        self._buffer.append(numbers)
        if sum(map(len, self._buffer)) >= self._buffer_rows:
            self._flush()

    def _add_bytes(self, values: np.ndarray) -> None:
        """Adds 8-bit values by counting each of the 256: nothing is sorted."""
        lowest = -128 if self._dtype.kind == "i" else 0
        possible = np.arange(lowest, lowest + 256)
        counts = np.stack(
            [
                np.bincount(column.astype(np.intp) - lowest, minlength=256)
                for column in values.T
            ]
        )
        for value in self._missing_values:
            self._missing += counts[:, int(value) - lowest]
            counts[:, int(value) - lowest] = 0
        numbers = possible.astype(np.float64)
        self._moments.add_counted(numbers, counts)
        self._zeros += counts[:, -lowest]
        for feature, row in enumerate(counts):
            there = numbers[row > 0]
            if len(there):
                self._min[feature] = min(self._min[feature], there[0])
                self._max[feature] = max(self._max[feature], there[-1])
                self._distributions[feature].add_counted(there, row[row > 0])

    def _flush(self) -> None:
        """Sorts what waits into the distributions, feature by feature."""
        rows = np.concatenate(self._buffer)
        self._buffer = []
        for distribution, column in zip(self._distributions, rows.T, strict=True):
            distribution.add(column[~np.isnan(column)])

    def finish(self, *, scalar: bool) -> Column:
        """Returns the record of the column.

        Raises:
            ValueError: A feature has no finite value.
        """
        if self._buffer:
            self._flush()
        names = [
            self._name if scalar else f"{self._name}[{position}]"
            for position in range(len(self._missing))
        ]
        empty = tuple(
            name
            for name, count in zip(names, self._moments.count, strict=True)
            if not count
        )
        if empty:
            raise ValueError(
                f"Features {empty[:10]!r} have no finite value: all are NaN, infinite, "
                f"or one of {self._missing_values!r}; expected at least one. Leave "
                "them out of the inputs, or correct their source."
            )
        each = max(_MIN_RECORD_VALUES, _RECORD_VALUES // len(names))
        features = tuple(
            self._feature(place, name, each) for place, name in enumerate(names)
        )
        return Column(
            self._name, self._dtype.name, scalar, self._missing_values, features
        )

    def _feature(self, place: int, name: str, max_values: int) -> Feature:
        """Returns the record of one feature."""
        distribution = self._distributions[place]
        mode = distribution.mode()
        values, weights, rank_error = distribution.summary(max_values)
        return Feature(
            name=name,
            count=int(self._moments.count[place]),
            missing=int(self._missing[place]),
            infinite=int(self._infinite[place]),
            zeros=int(self._zeros[place]),
            mean=float(self._moments.mean[place]),
            variance=float(self._moments.variance[place]),
            min=float(self._min[place]),
            max=float(self._max[place]),
            mode=mode[0] if mode else None,
            mode_count=mode[1] if mode else None,
            distinct=distribution.distinct(),
            values=tuple(values.tolist()),
            weights=tuple(weights.tolist()),
            rank_error=rank_error,
        )


class TextAccumulator:
    """Streams a column of strings.

    Args:
        name: Of the column.
        missing_values: Texts that stand for a missing value.
    """

    def __init__(self, name: str, missing_values: tuple[str, ...]) -> None:
        self._name, self._missing_values = name, missing_values
        self._absent = {value.encode() for value in missing_values}
        self._count = self._missing = 0
        self._counts = Counts()

    def add(self, values: np.ndarray) -> None:
        """Adds bytes or texts of any shape."""
        texts = [
            value.encode() if isinstance(value, str) else value
            for value in values.reshape(-1).tolist()
        ]
        present = [text for text in texts if text not in self._absent]
        self._missing += len(texts) - len(present)
        self._count += len(present)
        self._counts.add(present)

    def finish(self, *, scalar: bool) -> TextColumn:
        """Returns the record of the column.

        Raises:
            ValueError: All values are missing.
        """
        if not self._count:
            raise ValueError(
                f"Column {self._name!r} has only missing values "
                f"{self._missing_values!r}; expected at least one other text. Leave it "
                "out of the inputs, or correct its source."
            )
        mode = self._counts.mode()
        values, counts = zip(*self._counts.most_common() or [(b"", 0)], strict=True)
        return TextColumn(
            name=self._name,
            scalar=scalar,
            missing_values=self._missing_values,
            count=self._count,
            missing=self._missing,
            distinct=self._counts.distinct(),
            values=tuple(_text(value) for value in values),
            counts=counts,
            count_error=self._counts.error,
            mode=_text(mode[0]) if mode else None,
        )


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="backslashreplace")
