"""`fit_statistics`: what inputs are like, in one pass, and a layer from it."""

import collections
import dataclasses
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfamp.data import _examples
from tfamp.data.layers import ColumnRule, Condition
from tfamp.records import checks, console
from tfamp.records.record import Record, TableRecord

FILLS = ("mean", "median")
# 1.5 quartile ranges are Tukey's fences (Exploratory Data Analysis, 1977, chapter 2).
_LEVELS = {"zscore": (3.0,), "iqr": (1.5,), "quantile": (0.01, 0.99)}
# Rows kept of a column, fewer where it has many features: 64 MiB of float32.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS, _SAMPLE_VALUES = 100_000, 10_000, 2**24
_RECORD_VALUES, _MIN_RECORD_VALUES = 400_000, 2_000
_MAX_TEXTS = 10_000


@dataclasses.dataclass(frozen=True)
class Column(Record):
    """A column of numbers, with a feature for each entry of the last axis."""

    name: str  # its key in the dict of inputs; "x" where inputs are one tensor
    dtype: str
    scalar: bool  # whether an example has one value, without an axis
    count: tuple[int, ...]
    missing: tuple[int, ...]  # NaN
    infinite: tuple[int, ...]
    mean: tuple[float, ...]
    variance: tuple[float, ...]  # divided by the count, as Keras and NumPy do
    min: tuple[float, ...]
    max: tuple[float, ...]
    values: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the name of each feature: "age", or "x[3]" if there are several."""
        places = range(len(self.count))
        return tuple(self.name if self.scalar else f"{self.name}[{i}]" for i in places)

    def array(self, field: str) -> Any:
        """Returns a figure of all features, `(features,)`; of a scalar a number."""
        values = np.array(getattr(self, field))
        return values[0].item() if self.scalar else values

    def quantile(self, q: float) -> Any:
        """Returns the smallest value with the fraction `q` at or below, as `array`."""
        checks.fraction("q", q)
        found = np.array(self.max if q == 1 else self.min)
        if 0 < q < 1:
            found = np.array([_quantiles(one, q) for one in self.values])
        return found[0].item() if self.scalar else found


@dataclasses.dataclass(frozen=True)
class TextColumn(Record):
    """A column of strings; entries of a vector are counted together."""

    name: str
    count: int
    values: tuple[str, ...] = dataclasses.field(repr=False)
    counts: tuple[int, ...] = dataclasses.field(repr=False)

    def vocabulary(self, max_size: int | None = None) -> list[str]:
        """Returns the most frequent values, as `keras.layers.StringLookup` takes."""
        return list(self.values[:max_size])


@dataclasses.dataclass(frozen=True)
class Statistics(TableRecord):
    """What the inputs of a dataset are like, column by column; `print` it for a table.

    `statistics["age"]` is the record of a column; `to_json` and `from_json` keep it.
    """

    columns: tuple[Column | TextColumn, ...]
    num_examples: int
    named: bool  # whether inputs are a dict

    def __getitem__(self, name: str) -> Any:
        """Returns the record of a column."""
        found = {column.name: column for column in self.columns}
        if name not in found:
            raise ValueError(
                f"Unknown column {name!r}; expected one of {tuple(found)!r}. "
                "Inputs that are one tensor are column 'x'."
            )
        return found[name]

    def table(self) -> str:
        """Returns a row for each feature, up to 200 of them."""
        fields = ("count", "missing", "infinite", "mean", "variance", "min", "max")
        rows: list[Any] = []
        for column in self.columns:
            if isinstance(column, TextColumn):
                rows.append([column.name, str(column.count)])
                continue
            figures = zip(*(getattr(column, each) for each in fields), strict=True)
            pairs = zip(column.names, figures, strict=True)
            rows += [[name, *(f"{x:.6g}" for x in found)] for name, found in pairs]
        shown = {"Feature": console.FOLD, **dict.fromkeys(fields, console.RIGHT)}
        title = f"{self.num_examples} examples, {len(rows)} features"
        return console.text_of(console.table(shown, rows[:200], title=title))

    def as_layer(
        self,
        missing: Any = "mean",
        clip: Any = (0.01, 0.99),
        *,
        columns: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Condition:
        """Returns a layer that standardizes inputs by these statistics.

        NaN is filled, outliers are clipped, and values are brought to mean 0 and
        standard deviation 1, by what the training data is like after that. A constant
        feature becomes 0. Columns of a dict are joined.

        Args:
            missing: "mean", "median" or a number fills NaN; None passes it on. The mean
                follows outliers, the median doesn't.
            clip: Values beyond are set to the limit. (0.01, 0.99) limits at quantiles,
                ("zscore", 3.0) at so many standard deviations from the mean,
                ("iqr", 1.5) at so many quartile ranges beyond the quartiles, None
                nowhere: inf then passes through.
            columns: The columns of a dict to take, in the order to join them; None
                for all.
            name: Of the layer.
        """
        chosen = self.columns
        if columns is not None:
            chosen = tuple(self[column] for column in columns)
        texts = tuple(c.name for c in chosen if isinstance(c, TextColumn))
        if texts:
            raise ValueError(
                f"Columns {texts!r} are text; expected `columns` without them. Encode "
                "text with `StringLookup(vocabulary=statistics[name].vocabulary())`."
            )
        unclipped: list[str] = []
        limits = check_rule("clip", clip)
        rules = [_rule(column, missing, limits, unclipped) for column in chosen]
        if unclipped:
            warnings.warn(
                f"`clip` would make features {tuple(unclipped[:10])!r} constant, as "
                "nearly all of their values are equal; they are not clipped. To clip "
                "nothing, pass `clip=None`.",
                stacklevel=2,
            )
        return Condition(rules, named=self.named, name=name)


def _quantiles(values: Any, q: Any) -> Any:
    # 0.1 * 10 times over must not ask for rank 3.0000000000000004.
    ranks = np.ceil(np.asarray(q) * len(values) * (1 - 2**-50)).astype(int) - 1
    return np.asarray(values)[np.maximum(ranks, 0)]


def _rule(
    column: Any,
    missing: Any,
    clip: tuple[str, tuple[float, ...]] | None,
    unclipped: list[str],
) -> ColumnRule:
    """Returns the rule of a column; what clipping would make constant stays whole.

    The exact moments serve values that stay as they are. Otherwise they are those of
    the clipped values on record: outliers that are clipped don't stretch the scale.
    """
    lower, upper = outlier_limits(column, clip)
    low, high = np.array(column.min), np.array(column.max)
    lost = (np.clip(low, lower, upper) == np.clip(high, lower, upper)) & (low < high)
    unclipped += [column.names[i] for i in np.flatnonzero(lost)]
    lower[lost], upper[lost] = -np.inf, np.inf
    center, width = np.array(column.mean), np.sqrt(column.variance)
    for i in np.flatnonzero((low < lower) | (high > upper)):
        values = np.clip(column.values[i], lower[i], upper[i])
        center[i], width[i] = values.mean(), values.std()
    width[width == 0] = 1.0
    limits = {"lower": lower, "upper": upper, "center": center, "width": width}
    return ColumnRule(
        name=column.name,
        scalar=column.scalar,
        fill=_fill_values(column, missing),
        **{key: tuple(values.tolist()) for key, values in limits.items()},
    )


def _fill_values(column: Column, missing: Any) -> tuple[float, ...]:
    if isinstance(missing, str):
        checks.choice("missing", missing, FILLS)
        found = column.mean if missing == "mean" else column.quantile(0.5)
        return tuple(np.ravel(found).tolist())
    is_number = isinstance(missing, numbers.Real) and math.isfinite(missing)
    if missing is not None and (isinstance(missing, bool) or not is_number):
        raise ValueError(
            f"`missing` is {missing!r}; expected a finite number, one of {FILLS!r}, or "
            "None to leave NaN. Pass 'median' if there are outliers."
        )
    value = math.nan if missing is None else float(missing)
    return (value,) * len(column.count)


def check_rule(argument: str, rule: Any) -> tuple[str, tuple[float, ...]] | None:
    """Returns a rule about outliers as its name and numbers."""
    if rule is None:
        return None
    parts = (rule,) if isinstance(rule, str) or not np.iterable(rule) else (*rule,)
    if parts and not isinstance(parts[0], str):
        parts = ("quantile", *parts)
    name, *given = parts or ("quantile", 0.0)
    checks.choice(argument, name, _LEVELS)
    levels = tuple(given) or _LEVELS[name]
    is_sound = len(levels) == len(_LEVELS[name]) and levels[0] >= 0 < levels[-1]
    if not is_sound or (name == "quantile" and not levels[0] < levels[1] <= 1):
        raise ValueError(
            f"`{argument}` is {rule!r}; expected None, ('zscore', 3.0), ('iqr', 1.5) "
            "or ('quantile', 0.01, 0.99), the lower one first. Pass one of these."
        )
    return name, levels


def outlier_limits(
    column: Column, rule: tuple[str, tuple[float, ...]] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest value that is no outlier, each `(features,)`."""
    name, (level, *rest) = rule or ("zscore", (math.inf,))
    if name == "quantile":
        low, high = (np.ravel(column.quantile(q)) for q in (level, *rest))
        return low, high
    low = high = np.array(column.mean)
    width = np.sqrt(column.variance)
    if name == "iqr":
        low, high = (np.ravel(column.quantile(q)) for q in (0.25, 0.75))
        width = high - low
    reach = level * width if rule else np.full(len(low), np.inf)
    return low - reach, high + reach


def fit_statistics(dataset: Any, *, batched: bool | None = None) -> Statistics:
    """Returns the statistics of a dataset's inputs, read in one pass.

    Counts, mean, variance, minimum and maximum are exact. Quantiles are exact up to
    100,000 rows; beyond that they are those of 100,000 rows drawn at random (10,000
    where a column has more than 1,600 features), whose median is off by 0.16 % in rank.
    NaN and inf are counted and touch nothing else.

    The features of a tensor are the entries of its last axis: columns of a table,
    channels of an image. Targets and sample weights are left out.

    Args:
        dataset: A `tf.data.Dataset` of examples or batches, x, (x, y) or
            (x, y, sample_weight), where x is a tensor or a dict of them; a `Pipeline`;
            or arrays in the same forms. The training part alone, without augmentation.
        batched: Whether elements are batches; None tells from their shapes.
    """
    dataset = tuple(dataset) if isinstance(dataset, list) else dataset
    read = _examples.read("dataset", dataset, batched=batched, inputs_only=True)
    gathered: dict[str, _Numbers | _Texts] = {
        one.name: _Texts(one) if one.is_text else _Numbers(one) for one in read.columns
    }
    num_examples = 0
    for chunk in read.chunks("Reading statistics"):
        for name, one in gathered.items():
            one.take(chunk[name])
        num_examples += len(chunk[name])
    found = tuple(one.finish() for one in gathered.values())
    return Statistics(found, num_examples, read.columns[0].name != "x")


class _Numbers(_examples.Numbers):
    """Gathers a column of numbers; its features are the entries of the last axis."""

    def __init__(self, column: _examples.Column) -> None:
        self.name = column.name.removeprefix("x/")
        if column.shape and not column.shape[-1]:
            raise ValueError(
                f"Column {self.name!r} has examples of shape {column.shape}; expected "
                "a last axis of known size. Set it with `tf.ensure_shape` in a map."
            )
        super().__init__(int(column.shape[-1] or 1) if column.shape else 1)
        self._column = column
        rows = _SAMPLE_VALUES // self.num_features
        size = int(np.clip(rows, _MIN_SAMPLE_ROWS, _SAMPLE_ROWS))
        self._sample = _examples.RowSample(size)

    def take(self, values: np.ndarray) -> None:
        """Takes values `(..., features)` in the column's own dtype."""
        rows = values.reshape(-1, self.num_features)
        self.add(rows)
        self._sample.add(rows)

    def finish(self) -> Column:
        """Returns the record of the column; each feature needs a finite value."""
        limit = max(_MIN_RECORD_VALUES, _RECORD_VALUES // self.num_features)
        values = []
        for i, sampled in enumerate(self._sample.rows().T.astype(np.float64)):
            finite = np.sort(sampled[np.isfinite(sampled)])
            if not len(finite):  # of a feature that is nearly always missing
                finite = np.array([self.low[i], self.high[i]])
            if len(finite) > limit:
                finite = _quantiles(finite, (np.arange(limit) + 0.5) / limit)
            values.append(tuple(finite.tolist()))
        found = Column(
            *(self.name, self._column.dtype, self._column.shape == ()),
            count=tuple(self.num_finite.tolist()),
            missing=tuple(self.num_nan.tolist()),
            infinite=tuple(self.num_infinite.tolist()),
            mean=tuple(self.mean.tolist()),
            variance=tuple(self.variance.tolist()),
            min=tuple(self.low.tolist()),
            max=tuple(self.high.tolist()),
            values=tuple(values),
        )
        empty = tuple(n for n, c in zip(found.names, found.count, strict=True) if not c)
        if empty:
            raise ValueError(
                f"Features {empty[:10]!r} have no finite value; expected at least one. "
                "Leave them out of the inputs, or correct their source."
            )
        return found


class _Texts:
    """Counts a column of strings."""

    def __init__(self, column: _examples.Column) -> None:
        self.name, self._count = column.name.removeprefix("x/"), 0
        self._counts: collections.Counter[bytes] = collections.Counter()

    def take(self, values: np.ndarray) -> None:
        """Takes bytes or texts of any shape."""
        texts = values.reshape(-1).tolist()
        self._count += len(texts)
        encoded = (one.encode() if isinstance(one, str) else one for one in texts)
        self._counts.update(encoded)
        if len(self._counts) > 2 * _MAX_TEXTS:
            kept = self._counts.most_common(_MAX_TEXTS)
            self._counts = collections.Counter(dict(kept))

    def finish(self) -> TextColumn:
        """Returns the record of the column: the largest count first, ties by value."""
        ordered = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        values, counts = zip(*ordered[:_MAX_TEXTS], strict=True)
        texts = (value.decode("utf-8", errors="backslashreplace") for value in values)
        return TextColumn(self.name, self._count, tuple(texts), counts)
