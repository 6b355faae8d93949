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
class Column(Record):
    """A column of numbers, with a feature for each entry of the last axis.

    The figures have an entry a feature, and but for two counts are of finite values.
    """

    name: str  # its key in the dict of inputs; "x" where inputs are one tensor
    dtype: str
    scalar: bool  # whether an example has one value, without an axis
    missing_values: tuple[float, ...]  # that stand for a missing value, besides NaN
    count: tuple[int, ...]
    missing: tuple[int, ...]  # NaN, and what was declared to stand for a missing value
    infinite: tuple[int, ...]
    mean: tuple[float, ...]
    variance: tuple[float, ...]  # divided by the count, as Keras and NumPy do
    min: tuple[float, ...]
    max: tuple[float, ...]
    # Values in ascending order that stand for all, and how many each stands for.
    values: tuple[tuple[float, ...], ...] = dataclasses.field(repr=False)
    weights: tuple[tuple[int, ...], ...] = dataclasses.field(repr=False)

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
        """Returns the smallest value of each feature with the fraction `q` at or below.

        That is an array `(features,)`; of a scalar a number. It is one of the values,
        never a mean of two (NumPy's "inverted_cdf").
        """
        checks.fraction("q", q)
        found = np.array(self.max if q == 1 else self.min)
        if 0 < q < 1:
            for i, upto in enumerate(map(np.cumsum, self.weights)):
                # 0.1 * 10 times over must not ask for rank 3.0000000000000004.
                place = np.searchsorted(upto, q * upto[-1] * (1 - 2**-50))
                found[i] = self.values[i][min(int(place), len(upto) - 1)]
        return found[0].item() if self.scalar else found


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
    totals = np.sum([column.count, column.missing, column.infinite], axis=0)
    shares = map(units.format_share, column.missing / totals)
    quantiles = [np.ravel(column.quantile(q)) for q in (0.01, 0.5, 0.99)]
    std = np.sqrt(column.variance)
    figures = zip(column.mean, std, column.min, *quantiles, column.max, strict=True)
    return [
        (
            f"{name} (constant)" if low == high else name,
            *(share, f"{infinite:,}"),
            *(f"{value:.4g}" for value in values),
        )
        for name, share, infinite, values, low, high in zip(
            *(column.names, shares, column.infinite, figures, column.min, column.max),
            strict=True,
        )
    ]


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
    low, high = np.array(column.min), np.array(column.max)
    lost = (np.clip(low, lower, upper) == np.clip(high, lower, upper)) & (low < high)
    unclipped += [column.names[i] for i in np.flatnonzero(lost)]
    lower[lost], upper[lost] = -np.inf, np.inf
    center, width = np.array(column.mean), np.sqrt(column.variance)
    for i in np.flatnonzero((low < lower) | (high > upper)):
        values = np.clip(column.values[i], lower[i], upper[i])
        center[i] = np.average(values, weights=column.weights[i])
        squares = (values - center[i]) ** 2
        width[i] = math.sqrt(np.average(squares, weights=column.weights[i]))
    width[width == 0] = 1.0
    return ColumnRule(
        name=column.name,
        scalar=column.scalar,
        missing_values=column.missing_values,
        fill=_fill_values(column, missing),
        lower=tuple(lower.tolist()),
        upper=tuple(upper.tolist()),
        center=tuple(center.tolist()),
        width=tuple(width.tolist()),
    )


def _fill_values(column: Column, missing: Any) -> tuple[float, ...]:
    """Returns what to write for a missing value of each feature; NaN for None."""
    if isinstance(missing, str):
        checks.choice("missing", missing, FILLS)
        found = column.mean if missing == "mean" else column.quantile(0.5)
        return tuple(np.ravel(found).tolist())
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
    return (value,) * len(column.count)


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
