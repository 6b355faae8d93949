"""Statistics of inputs in one pass."""

import collections
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data import _examples
from tfamp.data._figures import Numbers, RowSample
from tfamp.data.features import Column, Statistics, TextColumn
from tfamp.data.layers import suits

# Rows kept of a column, fewer where it has many features: 64 MiB of float32.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS, _SAMPLE_VALUES = 100_000, 10_000, 2**24
# Of a record; a column with many features keeps fewer of each.
_RECORD_VALUES, _MIN_RECORD_VALUES = 400_000, 2_000
# Texts that are counted one by one; beyond twice as many the rare ones are left out.
_MAX_TEXTS = 10_000


def fit_statistics(
    dataset: Any, *, missing_value: Any = None, batched: bool | None = None
) -> Statistics:
    """Returns the statistics of a dataset's inputs, read in one pass.

    Counts, mean, variance, minimum and maximum are exact. Quantiles are exact up to
    100,000 rows; beyond that they are those of 100,000 rows drawn at random (10,000
    where a column has more than 1,600 features), whose median is off by 0.16 % in rank.
    NaN and inf are counted and touch nothing else. Memory is up to 0.8 MiB per feature,
    twice that of float64, whatever the dataset's length.

    The features of a tensor are the entries of its last axis: columns of a table,
    channels of an image. Targets and sample weights are left out.

    Args:
        dataset: A `tf.data.Dataset` of examples or batches, x, (x, y) or
            (x, y, sample_weight), where x is a tensor or a dict of them; a `Pipeline`;
            or arrays in the same forms. The training part alone, without augmentation.
        missing_value: What stands for a missing value besides NaN, in all columns that
            can hold it: a number, a text, or several.
        batched: Whether elements are batches; None to tell from the stages of a
            pipeline, else from their shapes.

    Raises:
        TypeError: Inputs are nested, ragged, sparse or complex.
        ValueError: The dataset is empty or infinite, a feature has no finite value,
            or an argument doesn't suit.

    Example:
        >>> import numpy as np
        >>> ages = np.array([[20.0], [np.nan], [40.0]], np.float32)
        >>> statistics = fit_statistics(ages)
        >>> statistics["x"].array("mean"), statistics["x"].array("missing")
        (array([30.]), array([1]))
    """
    # A list of x and y is no tuple of columns.
    dataset = tuple(dataset) if isinstance(dataset, list) else dataset
    read = _examples.read("dataset", dataset, batched=batched, inputs_only=True)
    declared = _values(missing_value)
    gathered: dict[str, _Numbers | _Texts] = {}
    for column in read.columns:
        kind = _Texts if column.is_text else _Numbers
        gathered[column.name] = kind(column, declared)
    names = tuple(one.name for one in gathered.values())
    unused = set(declared).difference(*(g.missing_values for g in gathered.values()))
    if unused:
        raise ValueError(
            f"`missing_value` {min(map(str, unused))!r} cannot occur in columns "
            f"{names!r}; expected one that a column can hold. Correct it, or leave it "
            "out."
        )
    num_examples = 0
    for chunk in read.chunks("Reading statistics"):
        for name, one in gathered.items():
            one.take(chunk[name])
        num_examples += len(chunk[name])
    found = tuple(one.finish() for one in gathered.values())
    return Statistics(found, num_examples, read.columns[0].name != "x")


def _values(missing_value: Any) -> tuple[Any, ...]:
    """Returns one value or several as a tuple of floats and texts, without NaN."""
    if missing_value is None:
        return ()
    is_one = isinstance(missing_value, str) or not isinstance(missing_value, Iterable)
    values = (missing_value,) if is_one else tuple(missing_value)
    converted = (v if isinstance(v, str) else float(v) for v in values)
    return tuple(v for v in converted if isinstance(v, str) or not math.isnan(v))


class _Numbers(Numbers):
    """Gathers a column of numbers; its features are the entries of the last axis."""

    def __init__(self, column: _examples.Column, declared: tuple[Any, ...]) -> None:
        self.name = column.name.removeprefix("x/")
        if column.shape and not column.shape[-1]:
            raise ValueError(
                f"Column {self.name!r} has examples of shape {column.shape}; expected "
                "a last axis of known size, at least 1, which holds the features. Set "
                "it with `tf.ensure_shape` in a map."
            )
        super().__init__(int(column.shape[-1] or 1) if column.shape else 1)
        dtype = tf.as_dtype(column.dtype).as_numpy_dtype
        self._column = column
        self.missing_values = tuple(v for v in declared if suits(v, dtype))
        rows = _SAMPLE_VALUES // self.num_features
        self._sample = RowSample(int(np.clip(rows, _MIN_SAMPLE_ROWS, _SAMPLE_ROWS)))

    def take(self, values: np.ndarray) -> None:
        """Takes values `(..., features)` in the column's own dtype."""
        rows = values.reshape(-1, self.num_features)
        if self.missing_values:
            # In their own dtype, so that 0.1 finds a float32 0.1.
            marks = np.array(self.missing_values).astype(rows.dtype)
            absent = np.any([rows == mark for mark in marks], axis=0)
            rows = np.where(absent, np.nan, rows.astype(np.float64))
        self.add(rows)
        self._sample.add(rows)

    def finish(self) -> Column:
        """Returns the record of the column; each feature needs a finite value."""
        limit = max(_MIN_RECORD_VALUES, _RECORD_VALUES // self.num_features)
        values, weights = [], []
        for i, sampled in enumerate(self._sample.rows().T.astype(np.float64)):
            finite = sampled[np.isfinite(sampled)]
            if not len(finite):  # of a feature that is nearly always missing
                finite = np.array([self.low[i], self.high[i]])
            if len(finite) > limit:  # each stands for as many
                places = (np.arange(limit) + 0.5) / limit
                finite = np.quantile(finite, places, method="inverted_cdf")
            seen, counts = np.unique(finite, return_counts=True)
            ends = np.cumsum(counts) * (self.num_finite[i] / counts.sum())
            ends = np.round(ends).astype(np.int64)
            values.append(tuple(seen.tolist()))
            weights.append(tuple(np.diff(ends, prepend=0).tolist()))
        found = Column(
            *(self.name, self._column.dtype, self._column.shape == ()),
            missing_values=self.missing_values,
            count=tuple(self.num_finite.tolist()),
            missing=tuple(self.num_nan.tolist()),
            infinite=tuple(self.num_infinite.tolist()),
            mean=tuple(self.mean.tolist()),
            variance=tuple(self.variance.tolist()),
            min=tuple(self.low.tolist()),
            max=tuple(self.high.tolist()),
            values=tuple(values),
            weights=tuple(weights),
        )
        empty = tuple(n for n, c in zip(found.names, found.count, strict=True) if not c)
        if empty:
            raise ValueError(
                f"Features {empty[:10]!r} have no finite value: all are NaN, infinite, "
                f"or one of {self.missing_values!r}; expected at least one. Leave them "
                "out of the inputs, or correct their source."
            )
        return found


class _Texts:
    """Counts a column of strings."""

    def __init__(self, column: _examples.Column, declared: tuple[Any, ...]) -> None:
        self.name = column.name.removeprefix("x/")
        self.missing_values = tuple(v for v in declared if isinstance(v, str))
        self._missing = 0
        self._counts: collections.Counter[bytes] = collections.Counter()
        self._count = 0

    def take(self, values: np.ndarray) -> None:
        """Takes bytes or texts of any shape."""
        texts = (
            value.encode() if isinstance(value, str) else value
            for value in values.reshape(-1).tolist()
        )
        absent = {value.encode() for value in self.missing_values}
        present = [text for text in texts if text not in absent]
        self._missing += values.size - len(present)
        self._count += len(present)
        self._counts.update(present)
        if len(self._counts) > 2 * _MAX_TEXTS:
            kept = self._counts.most_common(_MAX_TEXTS)
            self._counts = collections.Counter(dict(kept))

    def finish(self) -> TextColumn:
        """Returns the record of the column, of which not all may be missing."""
        if not self._count:
            raise ValueError(
                f"Column {self.name!r} has only missing values "
                f"{self.missing_values!r}; expected at least one other text. Leave it "
                "out of the inputs, or correct its source."
            )
        # The largest count first, ties by value.
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        values, counts = zip(*ordered[:_MAX_TEXTS], strict=True)
        texts = (value.decode("utf-8", errors="backslashreplace") for value in values)
        return TextColumn(
            *(self.name, self.missing_values, self._count, self._missing),
            values=tuple(texts),
            counts=counts,
        )
