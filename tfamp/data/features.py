"""`Statistics`: what `fit_statistics` found, and the constants of a layer from it."""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.box

from tfamp.data.layers import ColumnRule, Condition
from tfamp.records import checks, console, units
from tfamp.records.record import Record, TableRecord

FILLS = ("mean", "median")
# Three standard deviations keep 99.7 % of a normal; 1.5 quartile ranges are Tukey's
# fences (Exploratory Data Analysis, 1977, chapter 2) and keep 99.3 %.
_LEVELS = {"zscore": (3.0,), "iqr": (1.5,), "quantile": (0.01, 0.99)}
_TITLES = "Missing,Inf,Mean,Std,Min,1 %,Median,99 %,Max".split(",")
_MAX_ROWS = 60


@dataclasses.dataclass(frozen=True)
class Feature(Record):
    """What the values of one feature are like."""

    name: str  # the column's, with a position in it if it has several: "age", "x[3]"
    count: int  # finite values, which all that follows but for two counts is about
    missing: int  # NaN, and what was declared to stand for a missing value
    infinite: int  # inf and -inf
    mean: float
    variance: float  # divided by the count, as Keras and NumPy do
    min: float
    max: float
    # Values in ascending order that stand for all, and how many each stands for.
    values: tuple[float, ...] = dataclasses.field(repr=False)
    weights: tuple[int, ...] = dataclasses.field(repr=False)

    @property
    def std(self) -> float:
        """Standard deviation."""
        return math.sqrt(self.variance)

    @property
    def median(self) -> float:
        """The smallest value with half of the values at or below it."""
        return self.quantile(0.5)

    @property
    def is_constant(self) -> bool:
        """Whether all finite values are equal."""
        return self.min == self.max

    def quantile(self, q: float) -> float:
        """Returns the smallest value with the fraction `q` in [0, 1] at or below it.

        It is one of the values, never a mean of two (NumPy's "inverted_cdf").
        """
        checks.fraction("q", q)
        if q in (0, 1):
            return self.max if q else self.min
        upto = np.cumsum(self.weights)
        # 0.1 * 10 times over must not ask for rank 3.0000000000000004.
        place = np.searchsorted(upto, q * upto[-1] * (1 - 2**-50))
        return self.values[min(int(place), len(self.values) - 1)]


@dataclasses.dataclass(frozen=True)
class Column(Record):
    """A column of numbers, with a feature for each entry of the last axis."""

    name: str  # its key in the dict of inputs; "x" where inputs are one tensor
    dtype: str
    scalar: bool  # whether an example has one value, without an axis
    missing_values: tuple[float, ...]  # that stand for a missing value, besides NaN
    features: tuple[Feature, ...]

    def array(self, field: str) -> Any:
        """Returns an attribute of all features, `(features,)`; of a scalar a number."""
        values = np.array([getattr(feature, field) for feature in self.features])
        return values[0].item() if self.scalar else values

    def quantile(self, q: float) -> Any:
        """Returns the quantile of each feature, `(features,)`; of a scalar a number."""
        values = np.array([feature.quantile(q) for feature in self.features])
        return values[0].item() if self.scalar else values


@dataclasses.dataclass(frozen=True)
class TextColumn(Record):
    """A column of strings; entries of a vector are counted together."""

    name: str
    missing_values: tuple[str, ...]  # that stand for a missing value
    count: int  # values that are not missing
    missing: int
    # The most frequent first, at most 10,000; bytes that are no UTF-8 are written with
    # backslashes. Of rare ones among many more the counts are the least there are.
    values: tuple[str, ...] = dataclasses.field(repr=False)
    counts: tuple[int, ...] = dataclasses.field(repr=False)

    def vocabulary(self, max_size: int | None = None) -> list[str]:
        """Returns the most frequent values, as `keras.layers.StringLookup` takes."""
        return list(self.values[:max_size])


@dataclasses.dataclass(frozen=True)
class Statistics(TableRecord):
    """What the inputs of a dataset are like, column by column.

    `statistics["age"]` is the record of a column, `print(statistics)` a table, and
    `to_json` and `from_json` keep it with the model.

    Args:
        columns: One record each, in the order of the inputs.
        num_examples: How many examples were read.
        named: Whether inputs are a dict.

    Example:
        >>> import numpy as np
        >>> from tfamp.data.statistics import fit_statistics
        >>> statistics = fit_statistics({"age": np.array([20.0, 40.0])})
        >>> statistics["age"].array("mean"), statistics["age"].quantile(0.5)
        (30.0, 20.0)
    """

    columns: tuple[Column | TextColumn, ...]
    num_examples: int
    named: bool

    def __getitem__(self, name: str) -> Any:
        """Returns the record of a column."""
        for column in self.columns:
            if column.name == name:
                return column
        names = tuple(column.name for column in self.columns)
        raise ValueError(
            f"Unknown column {name!r}; expected one of {names!r}. "
            "Inputs that are one tensor are column 'x'."
        )

    def as_layer(
        self,
        missing: Any = "mean",
        clip: Any = (0.01, 0.99),
        *,
        columns: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Condition:
        """Returns a layer that standardizes inputs by these statistics.

        In this order: missing values are filled, outliers are clipped, and values are
        brought to mean 0 and standard deviation 1, by what the training data is like
        after that. A constant feature becomes 0. Columns of a dict are joined.

        Args:
            missing: "mean", "median" or a number fills NaN and what was declared
                missing; None passes both on as NaN. The mean follows outliers, the
                median doesn't.
            clip: Values beyond are set to the limit. (0.01, 0.99) limits at quantiles,
                ("zscore", 3.0) at so many standard deviations from the mean,
                ("iqr", 1.5) at so many quartile ranges beyond the quartiles, None
                nowhere: inf then passes through.
            columns: The columns of a dict to take, in the order to join them; None
                for all.
            name: Of the layer.

        Returns:
            A layer for the model's inputs; see `Condition`.
        """
        chosen = self.columns
        if columns is not None:
            if not self.named or isinstance(columns, str):
                raise ValueError(
                    f"`columns` is {columns!r}; expected a tuple of names where inputs "
                    "are a dict, None otherwise. Correct it, or leave it out."
                )
            chosen = tuple(self[column] for column in columns)
        texts = tuple(c.name for c in chosen if isinstance(c, TextColumn))
        if texts:
            raise ValueError(
                f"Columns {texts!r} are text, which cannot be joined with numbers; "
                "expected `columns` without them. Encode text with "
                "`keras.layers.StringLookup(vocabulary=statistics[name].vocabulary())`."
            )
        unclipped: list[str] = []
        limits = check_rule("clip", clip)
        numeric = [column for column in chosen if isinstance(column, Column)]
        rules = [_rule(column, missing, limits, unclipped) for column in numeric]
        if unclipped:
            warnings.warn(
                f"`clip` would make features {tuple(unclipped[:10])!r} constant, since "
                "nearly all of their values are equal; they are not clipped. To clip "
                "nothing, pass `clip=None`.",
                stacklevel=2,
            )
        return Condition(rules, named=self.named, name=name)

    def table(self) -> str:
        """Returns a table with one row for each feature, at most 60 of them."""
        rows = [row for column in self.columns for row in _rows(column)]
        table = console.table(
            {"Feature": console.FOLD, **dict.fromkeys(_TITLES, console.RIGHT)},
            rows[:_MAX_ROWS],
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
        )
        lines = [line for line in console.text_of(table).splitlines() if line]
        if len(rows) > _MAX_ROWS:
            lines.append(f"... and {len(rows) - _MAX_ROWS} more features")
        return "\n".join([*lines, f"{self.num_examples:,} examples."])


def _rows(column: Column | TextColumn) -> list[tuple[str, ...]]:
    """Returns the table's rows of a column, one for each feature."""
    if isinstance(column, TextColumn):
        share = units.format_share(column.missing / (column.count + column.missing))
        text = f"{column.name} (text, {len(column.values):,} values)"
        return [(text, share, *("",) * 8)]
    rows = []
    for feature in column.features:
        total = feature.count + feature.missing + feature.infinite
        name = f"{feature.name} (constant)" if feature.is_constant else feature.name
        share = units.format_share(feature.missing / total)
        low, high = feature.quantile(0.01), feature.quantile(0.99)
        values = (feature.mean, feature.std, feature.min, low, feature.median, high)
        figures = (f"{value:.4g}" for value in (*values, feature.max))
        rows.append((name, share, f"{feature.infinite:,}", *figures))
    return rows


def _rule(
    column: Column,
    missing: Any,
    clip: tuple[str, tuple[float, ...]] | None,
    unclipped: list[str],
) -> ColumnRule:
    """Returns the rule of a column; what clipping would make constant stays whole.

    The exact moments serve values that stay as they are. Otherwise they are those of
    the clipped values on record: outliers that are clipped don't stretch the scale.
    """
    lower, upper = outlier_limits(column, clip)
    center, width = [], []
    for place, feature in enumerate(column.features):
        low, high = np.clip((feature.min, feature.max), lower[place], upper[place])
        if low == high and not feature.is_constant:
            lower[place], upper[place] = -np.inf, np.inf
            low, high = feature.min, feature.max
            unclipped.append(feature.name)
        mean, std = feature.mean, feature.std
        if (low, high) != (feature.min, feature.max):
            values = np.clip(np.array(feature.values), low, high)
            mean = float(np.average(values, weights=feature.weights))
            squares = np.average((values - mean) ** 2, weights=feature.weights)
            std = math.sqrt(squares)
        center.append(mean)
        width.append(std or 1.0)
    return ColumnRule(
        name=column.name,
        scalar=column.scalar,
        missing_values=column.missing_values,
        fill=_fill_values(column, missing),
        lower=tuple(lower.tolist()),
        upper=tuple(upper.tolist()),
        center=tuple(center),
        width=tuple(width),
    )


def _fill_values(column: Column, missing: Any) -> tuple[float, ...]:
    """Returns what to write for a missing value of each feature; NaN for None."""
    if isinstance(missing, str):
        checks.choice("missing", missing, FILLS)
        return tuple(getattr(feature, missing) for feature in column.features)
    if isinstance(missing, bool) or not isinstance(missing, (numbers.Real, type(None))):
        raise TypeError(
            f"`missing` is {missing!r}, of type {type(missing).__name__}; expected "
            f"one of {FILLS!r}, a number, or None. Pass 'median' if there are outliers."
        )
    if missing is not None and not math.isfinite(missing):
        raise ValueError(
            f"`missing` is {missing!r}; expected a finite number. Pass None to leave "
            "missing values as NaN."
        )
    value = math.nan if missing is None else float(missing)
    return (value,) * len(column.features)


def check_rule(argument: str, rule: Any) -> tuple[str, tuple[float, ...]] | None:
    """Returns a rule about outliers as its name and numbers.

    It may be a name alone, a name with its numbers, or two quantiles alone.

    Example:
        >>> check_rule("clip", "iqr"), check_rule("clip", (0.01, 0.99))
        (('iqr', (1.5,)), ('quantile', (0.01, 0.99)))
    """
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

    def limits(feature: Feature) -> tuple[float, float]:
        if rule is None:
            return -math.inf, math.inf
        name, (level, *rest) = rule
        if name == "quantile":
            return feature.quantile(level), feature.quantile(rest[0])
        if name == "zscore":
            low, high, width = feature.mean, feature.mean, feature.std
        else:
            low, high = feature.quantile(0.25), feature.quantile(0.75)
            width = high - low
        return low - level * width, high + level * width

    lower, upper = np.array([limits(f) for f in column.features], np.float64).T
    return lower, upper
