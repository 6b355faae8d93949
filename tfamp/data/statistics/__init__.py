"""Statistics of inputs in one pass, and the layer that applies them in the model."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data import _elements, _examples
from tfamp.data._figures import Numbers, RowSample, leads, rank_error, thin
from tfamp.data.statistics.conditioning import Condition as Condition
from tfamp.data.statistics.conditioning import suits
from tfamp.data.statistics.record import Column as Column
from tfamp.data.statistics.record import Feature as Feature
from tfamp.data.statistics.record import Statistics as Statistics
from tfamp.data.statistics.record import TextColumn as TextColumn
from tfamp.data.statistics.record import by_column

# Rows kept of a column, fewer where it has many features: 64 MiB of float32.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS = 100_000, 10_000
_SAMPLE_VALUES = 2**24
# Of a record; a column with many features keeps fewer of each.
_RECORD_VALUES, _MIN_RECORD_VALUES = 400_000, 2_000
# Texts that are counted one by one.
_MAX_TEXTS = 10_000


def fit_statistics(
    dataset: Any,
    *,
    columns: Sequence[str] | None = None,
    missing_value: Any = None,
    batched: bool | None = None,
) -> Statistics:
    """Returns the statistics of a dataset's inputs, read in one pass.

    Counts, mean, variance, minimum and maximum are exact: float64, merged by
    Welford's method. Quantiles and mode are exact up to 100,000 rows, and of 8-bit
    numbers always; beyond that they are those of 100,000 rows drawn at random (10,000
    where a column has more than 1,600 features). The rank of a quantile q then has a
    standard error of sqrt(q (1 - q) / 100,000): 0.16 % at the median, 0.03 % at the
    first percentile. Texts are counted exactly while at most 10,000 differ. NaN and
    inf are counted and touch nothing else. Memory is up to 0.8 MiB per feature,
    twice that of float64, whatever the dataset's length.

    The features of a tensor are the entries of its last axis: columns of a table,
    channels of an image. Targets and sample weights are left out.

    Args:
        dataset: A `tf.data.Dataset` of examples or batches, x, (x, y) or
            (x, y, sample_weight), where x is a tensor or a dict of them; a
            `tfamp.data.Pipeline`; or arrays `(examples, ...)` in the same forms.
            Without augmentation, and the training part alone: statistics of
            validation data in the model are a leak.
        columns: The columns of a dict to read, in the order in which a layer joins
            them; None for all.
        missing_value: What stands for a missing value besides NaN: a number, a
            text, several, or a dict of these by column.
        batched: Whether elements are batches; None to tell from the stages of a
            pipeline, else from their shapes.

    Returns:
        A record that prints as a table, goes to JSON, and makes a layer.

    Raises:
        TypeError: Inputs are nested, ragged, sparse or complex.
        ValueError: The dataset is empty or infinite, a feature has no finite value,
            shapes don't tell batches from examples, or an argument doesn't suit.

    Example:
        >>> import numpy as np
        >>> ages = np.array([[20.0], [np.nan], [40.0]], np.float32)
        >>> statistics = fit_statistics(ages)
        >>> statistics["x"].array("mean"), statistics["x"].array("missing")
        (array([30.]), array([1]))
    """
    is_stream = isinstance(dataset, tf.data.Dataset) or hasattr(dataset, "build")
    if not is_stream:
        if batched is False:
            raise ValueError(
                "`batched` is False, and `dataset` is arrays; expected None, since the "
                "first axis of arrays counts examples. Leave it out."
            )
        # A list of x and y is no tuple of columns.
        dataset = tuple(dataset) if isinstance(dataset, list) else dataset
    named = False
    paths: dict[str, str] = {}

    def select(element: Any) -> list[str]:
        nonlocal named
        inputs = _elements.inputs_of(element)
        named = isinstance(inputs, Mapping)
        known = tuple(_elements.named_columns(inputs))
        if columns is not None and not named:
            raise ValueError(
                f"`columns` is {columns!r}, and inputs are one tensor without names; "
                "expected None. Leave it out, or make the inputs a dict."
            )
        names = known if columns is None else columns
        if isinstance(names, str) or not names or set(names) - set(known):
            raise ValueError(
                f"`columns` is {columns!r}; expected a tuple of names among {known!r}. "
                "Correct it, or leave it out for all."
            )
        paths.update((f"x/{name}" if named else "x", name) for name in names)
        return list(paths)

    read = _examples.read(
        "dataset", dataset, batched=batched, select=select, tell_unclear=_tell_unclear
    )
    accumulators = _accumulators(read, paths, missing_value)

    def take(chunk: Mapping[str, np.ndarray]) -> None:
        for name, accumulator in accumulators.items():
            accumulator.take(chunk[name])

    num_examples = read.scan("Reading statistics", take)
    is_batches = read.in_elements or not is_stream
    reading = "batches" if is_batches else "single examples"
    return Statistics(
        columns=tuple(a.finish() for a in accumulators.values()),
        num_examples=num_examples,
        named=named,
        reading=f"elements read as {reading}: {read.reason}",
    )


def _accumulators(
    read: _examples.Examples, names: Mapping[str, str], missing_value: Any
) -> dict[str, "_NumberAccumulator | _TextAccumulator"]:
    """Returns what gathers each column, whose names are those of its path."""
    dtypes: dict[str, Any] = {}
    for column in read.columns:
        name = names[column.name]
        if column.shape and not column.shape[-1]:
            raise ValueError(
                f"Column {name!r} has examples of shape {column.shape}; expected a "
                "last axis of known size, at least 1, which holds the features. Set it "
                "with `tf.ensure_shape` in a map."
            )
        # Objects stand for text.
        dtypes[name] = np.dtype(
            object if column.is_text else tf.as_dtype(column.dtype).as_numpy_dtype
        )
    missing = by_column(missing_value, dtypes)
    found: dict[str, _NumberAccumulator | _TextAccumulator] = {}
    for column in read.columns:
        kind = _TextAccumulator if column.is_text else _NumberAccumulator
        name = names[column.name]
        found[column.name] = kind(name, column, missing[name])
    return found


def _tell_unclear(element_spec: Any) -> tuple[bool, str]:
    """Returns whether elements are batches where their shapes leave it open."""
    shapes = [spec.shape for spec in tf.nest.flatten(element_spec)]
    if len(shapes) == 1:
        return False, f"elements of shape {shapes[0]} are taken for single ones"
    inputs = tf.nest.flatten(_elements.inputs_of(element_spec))
    # Right or wrong, only `num_examples` hangs on it: the last axis stays the last.
    if all(spec.shape.rank > 1 for spec in inputs):
        return True, "the first dimensions of all parts are equal"
    raise ValueError(
        f"Elements {element_spec} may be batches of scalars or single vectors; "
        "expected shapes that tell. Pass `batched=True` or `batched=False`."
    )


class _NumberAccumulator(Numbers):
    """Gathers a column of numbers; its features are the entries of the last axis."""

    def __init__(
        self, name: str, column: _examples.Column, missing_values: tuple[float, ...]
    ) -> None:
        super().__init__(int(column.shape[-1] or 1) if column.shape else 1)
        self._name, self._column, self._missing_values = name, column, missing_values
        rows = _SAMPLE_VALUES // self.num_features
        self._sample = RowSample(int(np.clip(rows, _MIN_SAMPLE_ROWS, _SAMPLE_ROWS)), 0)

    def take(self, values: np.ndarray) -> None:
        """Takes values `(..., features)` in the column's own dtype."""
        rows = values.reshape(-1, self.num_features)
        if self._missing_values:
            # In their own dtype, so that 0.1 finds a float32 0.1.
            marks = [v for v in self._missing_values if suits(v, rows.dtype)]
            absent = [rows == np.asarray(mark).astype(rows.dtype) for mark in marks]
            rows = np.where(np.any(absent, axis=0), np.nan, rows.astype(np.float64))
        self.add(rows)
        if self.histogram is None:
            self._sample.add(rows[self._sample.choose(len(rows))])

    def finish(self) -> Column:
        """Returns the record of the column; each feature needs a finite value."""
        scalar = self._column.shape == ()
        names = [
            self._name if scalar else f"{self._name}[{place}]"
            for place in range(self.num_features)
        ]
        found = zip(names, self.num_finite, strict=True)
        empty = tuple(name for name, count in found if not count)
        if empty:
            raise ValueError(
                f"Features {empty[:10]!r} have no finite value: all are NaN, infinite, "
                f"or one of {self._missing_values!r}; expected at least one. Leave "
                "them out of the inputs, or correct their source."
            )
        rows, missing = self._sample.rows(), self._missing_values
        features = (self._feature(i, name, rows) for i, name in enumerate(names))
        return Column(self._name, self._column.dtype, scalar, missing, tuple(features))

    def _feature(self, place: int, name: str, rows: np.ndarray) -> Feature:
        """Returns the record of one feature."""
        count = int(self.num_finite[place])
        values, counts, error = self._counted(place, rows)
        is_whole = error == 0
        most = int(counts.argmax())  # of equal counts the first, the smallest value
        repeats = counts[most] > 1 or len(values) == 1
        has_mode = repeats and (is_whole or leads(counts))
        mode = float(values[most])
        mode_count = round(int(counts[most]) * count / int(counts.sum()))
        distinct = len(values) if is_whole else None
        max_values = max(_MIN_RECORD_VALUES, _RECORD_VALUES // self.num_features)
        if len(values) > max_values:
            error += 0.5 / max_values
        values, counts = thin(values, counts, max_values)
        ends = np.round(np.cumsum(counts) * (count / counts.sum())).astype(np.int64)
        return Feature(
            name=name,
            count=count,
            missing=int(self.num_nan[place]),
            infinite=int(self.num_infinite[place]),
            zeros=count - int(self.num_nonzero[place]),
            mean=float(self.mean[place]),
            variance=float(self.variance[place]),
            min=float(self.low[place]),
            max=float(self.high[place]),
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
        histogram = self.histogram
        if histogram is not None:
            lowest = -128 if self._column.dtype == "int8" else 0
            seen = np.flatnonzero(histogram[place])
            return (seen + lowest).astype(np.float64), histogram[place][seen], 0.0
        sampled = rows[:, place].astype(np.float64)
        values, counts = np.unique(sampled[np.isfinite(sampled)], return_counts=True)
        if self._sample.is_whole:
            return values, counts, 0.0
        if not len(values):  # of a feature that is nearly always missing
            ends = [self.low[place], self.high[place]]
            values = np.unique(np.array(ends, np.float64))
            return values, np.ones(len(values), np.int64), 1.0
        return values, counts, rank_error(int(counts.sum()))


class _TextAccumulator:
    """Counts a column of strings, one by one while few differ."""

    def __init__(
        self, name: str, column: _examples.Column, missing_values: tuple[str, ...]
    ) -> None:
        self._name, self._column, self._missing_values = name, column, missing_values
        self._absent = {value.encode() for value in missing_values}
        self._count = self._missing = 0
        self._counts: collections.Counter[bytes] | None = collections.Counter()
        self._sample = RowSample(_SAMPLE_ROWS, 0)

    def take(self, values: np.ndarray) -> None:
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

    def finish(self) -> TextColumn:
        """Returns the record of the column, of which not all may be missing."""
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
            scalar=self._column.shape == (),
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
