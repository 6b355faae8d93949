"""What is kept of a column of inputs while it streams by."""

import collections

import numpy as np

from tfamp.data.profile import examples
from tfamp.data.profile.numbers import Numbers
from tfamp.data.profile.sample import RowSample, leads, rank_error, thin
from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.data.statistics.missing import is_missing

# Rows kept of a column, fewer where it has many features: 64 MiB of float32.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS = 100_000, 10_000
_SAMPLE_VALUES = 2**24
# Of a record; a column with many features keeps fewer of each.
_RECORD_VALUES, _MIN_RECORD_VALUES = 400_000, 2_000
# Texts that are counted one by one.
_MAX_TEXTS = 10_000


class NumberAccumulator:
    """Profiles a column of numbers.

    Args:
        name: Of the column.
        column: What it is like.
        missing_values: Numbers that stand for a missing value, besides NaN.
    """

    def __init__(
        self, name: str, column: examples.Column, missing_values: tuple[float, ...]
    ) -> None:
        self._name, self._dtype = name, column.dtype
        self._missing_values = missing_values
        self._num_features = int(column.shape[-1] or 1) if column.shape else 1
        self._numbers = Numbers(self._num_features)
        rows = _SAMPLE_VALUES // self._num_features
        self._sample = RowSample(int(np.clip(rows, _MIN_SAMPLE_ROWS, _SAMPLE_ROWS)), 0)

    def add(self, values: np.ndarray) -> None:
        """Takes values `(..., features)` in the column's own dtype."""
        rows = values.reshape(-1, self._num_features)
        if self._missing_values:
            absent = is_missing(rows, self._missing_values)
            rows = np.where(absent, np.nan, rows.astype(np.float64))
        self._numbers.add(rows)
        if self._numbers.histogram is None:
            chosen = self._sample.choose(len(rows))
            self._sample.add(rows[chosen])

    def finish(self, *, scalar: bool) -> Column:
        """Returns the record of the column.

        Raises:
            ValueError: A feature has no finite value.
        """
        names = [
            self._name if scalar else f"{self._name}[{place}]"
            for place in range(self._num_features)
        ]
        found = zip(names, self._numbers.num_finite, strict=True)
        empty = tuple(name for name, count in found if not count)
        if empty:
            raise ValueError(
                f"Features {empty[:10]!r} have no finite value: all are NaN, infinite, "
                f"or one of {self._missing_values!r}; expected at least one. Leave "
                "them out of the inputs, or correct their source."
            )
        rows = self._sample.rows()
        features = tuple(
            self._feature(place, name, rows) for place, name in enumerate(names)
        )
        return Column(self._name, self._dtype, scalar, self._missing_values, features)

    def _feature(self, place: int, name: str, rows: np.ndarray) -> Feature:
        """Returns the record of one feature."""
        numbers = self._numbers
        count = int(numbers.num_finite[place])
        values, counts, error = self._counted(place, rows)
        is_whole = error == 0
        most = int(counts.argmax())  # of equal counts the first, the smallest value
        repeats = counts[most] > 1 or len(values) == 1
        has_mode = repeats and (is_whole or leads(counts))
        mode = float(values[most])
        mode_count = round(int(counts[most]) * count / int(counts.sum()))
        distinct = len(values) if is_whole else None
        max_values = max(_MIN_RECORD_VALUES, _RECORD_VALUES // self._num_features)
        if len(values) > max_values:
            error += 0.5 / max_values
        values, counts = thin(values, counts, max_values)
        ends = np.round(np.cumsum(counts) * (count / counts.sum())).astype(np.int64)
        return Feature(
            name=name,
            count=count,
            missing=int(numbers.num_nan[place]),
            infinite=int(numbers.num_infinite[place]),
            zeros=count - int(numbers.num_nonzero[place]),
            mean=float(numbers.mean[place]),
            variance=float(numbers.variance[place]),
            min=float(numbers.low[place]),
            max=float(numbers.high[place]),
            mode=mode if has_mode else None,
            mode_count=mode_count if has_mode else None,
            distinct=distinct,
            values=tuple(values.tolist()),
            weights=tuple(np.diff(ends, prepend=0).tolist()),
            rank_error=error,
        )

    def _counted(
        self, place: int, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Returns distinct values, how often each occurs, and the error of ranks."""
        histogram = self._numbers.histogram
        if histogram is not None:
            lowest = -128 if self._dtype == "int8" else 0
            seen = np.flatnonzero(histogram[place])
            return (seen + lowest).astype(np.float64), histogram[place][seen], 0.0
        sampled = rows[:, place].astype(np.float64)
        values, counts = np.unique(sampled[np.isfinite(sampled)], return_counts=True)
        if self._sample.is_whole:
            return values, counts, 0.0
        if not len(values):  # of a feature that is nearly always missing
            ends = [self._numbers.low[place], self._numbers.high[place]]
            values = np.unique(np.array(ends, np.float64))
            return values, np.ones(len(values), np.int64), 1.0
        return values, counts, rank_error(int(counts.sum()))


class TextAccumulator:
    """Counts a column of strings.

    Args:
        name: Of the column.
        missing_values: Texts that stand for a missing value.
    """

    def __init__(self, name: str, missing_values: tuple[str, ...]) -> None:
        self._name, self._missing_values = name, missing_values
        self._absent = {value.encode() for value in missing_values}
        self._count = self._missing = 0
        self._counts: collections.Counter[bytes] | None = collections.Counter()
        self._sample = RowSample(_SAMPLE_ROWS, 0)

    def add(self, values: np.ndarray) -> None:
        """Takes bytes or texts of any shape."""
        texts = [
            value.encode() if isinstance(value, str) else value
            for value in values.reshape(-1).tolist()
        ]
        present = [text for text in texts if text not in self._absent]
        self._missing += len(texts) - len(present)
        self._count += len(present)
        self._sample.add(np.array(present, object)[self._sample.choose(len(present))])
        if self._counts is not None:
            self._counts.update(present)
            if len(self._counts) > _MAX_TEXTS:
                self._counts = None

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
        rows = self._sample.rows()
        is_whole = self._counts is not None or self._sample.is_whole
        counter = self._counts or collections.Counter(rows.tolist())
        scale = 1.0 if is_whole else self._count / len(rows)
        error = 0 if is_whole else round(rank_error(len(rows)) * self._count)
        # The largest count first, ties by value.
        ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
        values, counts = zip(*ordered[:_MAX_TEXTS], strict=True)
        has_mode = is_whole or leads(np.array(counts))
        return TextColumn(
            name=self._name,
            scalar=scalar,
            missing_values=self._missing_values,
            count=self._count,
            missing=self._missing,
            distinct=len(counter) if is_whole else None,
            values=tuple(_text(value) for value in values),
            counts=tuple(round(count * scale) for count in counts),
            count_error=error,
            mode=_text(values[0]) if has_mode else None,
        )


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="backslashreplace")
