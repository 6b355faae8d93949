"""`Statistics`: what `fit_statistics` found, and the constants of a layer from it."""

import dataclasses
import math
import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import rich.box

from tfamp.data._elements import TENSOR
from tfamp.data._figures import quantile
from tfamp.data.layers import ColumnRule, Condition
from tfamp.records import checks, console, units
from tfamp.records.record import Record, TableRecord

FILLS = ("mean", "median", "mode")
SCALES = ("standardize", "minmax")
# Three standard deviations keep 99.7 % of a normal; 1.5 quartile ranges are Tukey's
# fences (Exploratory Data Analysis, 1977, chapter 2) and keep 99.3 %.
_LEVELS = {"zscore": (3.0,), "iqr": (1.5,), "quantile": (0.01, 0.99)}
_DEFAULTS = {"missing": "mean", "clip": (0.01, 0.99), "scale": "standardize"}
_TITLES = "Missing,Inf,Mean,Std,Min,1 %,Median,99 %,Max,Mode".split(",")
_MAX_ROWS = 60


@dataclasses.dataclass(frozen=True)
class Feature(Record):
    """What the values of one feature are like.

    All but `missing` and `infinite` is about the finite values alone.

    Args:
        name: The column's name, with a position in it where the column has several
            features: "age", "x[3]".
        count: Finite values.
        missing: NaN, and what was declared to stand for a missing value.
        infinite: inf and -inf.
        zeros: Values equal to 0.
        mean: Their mean.
        variance: Their variance, divided by the count (as Keras and NumPy do).
        min: The smallest.
        max: The largest.
        mode: The most frequent value, the smallest of several; None where no value
            occurs twice.
        values: Values in ascending order that stand for all.
        weights: How many each stands for.
    """

    name: str
    count: int
    missing: int
    infinite: int
    zeros: int
    mean: float
    variance: float
    min: float
    max: float
    mode: float | None
    values: tuple[float, ...] = dataclasses.field(repr=False)
    weights: tuple[int, ...] = dataclasses.field(repr=False)

    @property
    def std(self) -> float:
        """Standard deviation."""
        return float(np.sqrt(self.variance))

    @property
    def median(self) -> float:
        """The smallest value with half of the values at or below it."""
        return self.quantile(0.5)

    @property
    def is_constant(self) -> bool:
        """Whether all finite values are equal."""
        return self.min == self.max

    def quantile(self, q: float) -> float:
        """Returns the smallest value with the fraction `q` at or below it.

        It is one of the values, never a mean of two (NumPy's "inverted_cdf").

        Raises:
            ValueError: `q` is not in [0, 1].
        """
        checks.fraction("q", q)
        if q in (0, 1):
            return self.max if q else self.min
        return quantile(np.array(self.values), np.array(self.weights), q)


@dataclasses.dataclass(frozen=True)
class Column(Record):
    """A column of numbers.

    Args:
        name: Its key in the dict of inputs; "x" where inputs are one tensor.
        dtype: Of its tensors, such as "float32".
        scalar: Whether an example has one value, without an axis.
        missing_values: Numbers that stand for a missing value, besides NaN.
        features: One for each entry of the last axis.
    """

    name: str
    dtype: str
    scalar: bool
    missing_values: tuple[float, ...]
    features: tuple[Feature, ...]

    def array(self, field: str) -> Any:
        """Returns a field of all features as an array `(features,)`.

        Of a scalar column it is one number. `field` is any attribute of `Feature`;
        a mode that is open is NaN.
        """
        found = [getattr(feature, field) for feature in self.features]
        values = np.array([np.nan if value is None else value for value in found])
        return values[0].item() if self.scalar else values

    def quantile(self, q: float) -> Any:
        """Returns the quantile of each feature, `(features,)`, or one number."""
        values = np.array([feature.quantile(q) for feature in self.features])
        return values[0].item() if self.scalar else values


@dataclasses.dataclass(frozen=True)
class TextColumn(Record):
    """A column of strings; entries of a vector are counted together.

    Args:
        name: Its key in the dict of inputs; "x" where inputs are one tensor.
        scalar: Whether an example has one value, without an axis.
        missing_values: Texts that stand for a missing value.
        count: Values that are not missing.
        missing: Values that are.
        values: The values, the most frequent first, at most 10,000; bytes that are no
            UTF-8 are written with backslashes.
        counts: How often each occurs; of rare ones among many more, at least so often.
    """

    name: str
    scalar: bool
    missing_values: tuple[str, ...]
    count: int
    missing: int
    values: tuple[str, ...] = dataclasses.field(repr=False)
    counts: tuple[int, ...] = dataclasses.field(repr=False)

    @property
    def mode(self) -> str:
        """The most frequent value."""
        return self.values[0]

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
        >>> statistics["age"].array("mean"), statistics.quantile(0.5, "age")
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

    def quantile(self, q: float, column: str = TENSOR) -> Any:
        """Returns the quantile of each feature of a column.

        That is an array `(features,)`, or a number for a scalar column; `q` is a
        fraction in [0, 1].
        """
        found = self[column]
        if isinstance(found, TextColumn):
            raise ValueError(
                f"Column {column!r} is text, which has no order; expected a column of "
                "numbers. Look at its `values` and `counts`."
            )
        return found.quantile(q)

    def as_layer(
        self,
        missing: Any = "mean",
        clip: Any = (0.01, 0.99),
        *,
        scale: Any = "standardize",
        columns: Sequence[str] | None = None,
        output: str = "concat",
        name: str | None = None,
    ) -> Condition:
        """Returns a layer that treats inputs by these statistics.

        In this order: missing values are filled, outliers are clipped, and values are
        scaled by what the training data is like after that. Each option but the last
        three is for all columns, or a dict by column; columns that a dict leaves out
        get the default.

        Args:
            missing: "mean", "median", "mode" or a number fills NaN and what was
                declared missing; None passes both on as NaN. The mean follows
                outliers, the median doesn't. A text fills missing text; text takes
                its mode for the three names.
            clip: Values beyond are set to the limit. (0.01, 0.99) or ("quantile",
                0.01, 0.99) limits at quantiles, ("zscore", 3.0) at so many standard
                deviations from the mean, ("iqr", 1.5) at so many quartile ranges
                beyond the quartiles, None nowhere: inf then passes through.
            scale: "standardize" for mean 0 and standard deviation 1, "minmax" for
                [0, 1], None for as it is. A constant feature becomes 0.
            columns: The columns of a dict to take, in the order to join them; None
                for all.
            output: "concat" joins the columns of a dict into one tensor, "dict"
                keeps them apart, which text needs.
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
        checks.choice("output", output, ("concat", "dict"))
        texts = tuple(c.name for c in chosen if isinstance(c, TextColumn))
        if texts and output == "concat":
            raise ValueError(
                f"Columns {texts!r} are text, which cannot be joined with numbers; "
                "expected `output='dict'`, or `columns` without them. Encode text with "
                "`keras.layers.StringLookup(vocabulary=statistics[name].vocabulary())`."
            )
        given = {"missing": missing, "clip": clip, "scale": scale}
        names = [column.name for column in chosen]
        options = {
            key: per_column(key, option, names, _DEFAULTS[key])
            for key, option in given.items()
        }
        unclipped: list[str] = []
        rules = []
        for column in chosen:
            own = {key: option[column.name] for key, option in options.items()}
            rules.append(_rule(column, own, unclipped))
        if unclipped:
            warnings.warn(
                f"`clip` would make features {tuple(unclipped[:10])!r} constant, since "
                "nearly all of their values are equal; they are not clipped. To say so "
                f"yourself, pass `clip={{{unclipped[0].split('[')[0]!r}: None}}`.",
                stacklevel=2,
            )
        form: Any = output
        return Condition(rules, named=self.named, output=form, name=name)

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
        return [(text, share, *("",) * 8, column.mode)]
    rows = []
    for feature in column.features:
        total = feature.count + feature.missing + feature.infinite
        name = f"{feature.name} (constant)" if feature.is_constant else feature.name
        share = units.format_share(feature.missing / total)
        low, high = feature.quantile(0.01), feature.quantile(0.99)
        values = (feature.mean, feature.std, feature.min, low, feature.median, high)
        figures = (f"{value:.4g}" for value in (*values, feature.max))
        mode = "open" if feature.mode is None else f"{feature.mode:.4g}"
        rows.append((name, share, f"{feature.infinite:,}", *figures, mode))
    return rows


def _rule(
    column: Column | TextColumn, options: Mapping[str, Any], unclipped: list[str]
) -> ColumnRule:
    """Returns the rule of a column by its `missing`, `clip` and `scale`.

    Features that clipping would have made constant are added to `unclipped`.
    """
    name, missing = column.name, options["missing"]
    if isinstance(column, TextColumn):
        return ColumnRule(
            name=name,
            text=True,
            scalar=column.scalar,
            missing_texts=column.missing_values,
            fill_text=_fill_text(column, missing),
        )
    scale = options["scale"]
    if scale is not None:
        checks.choice("scale", scale, SCALES)
    lower, upper = outlier_limits(column, check_rule("clip", options["clip"]))
    moved = []
    for place, feature in enumerate(column.features):
        left = max(lower[place], feature.min) < min(upper[place], feature.max)
        if not feature.is_constant and not left:
            lower[place], upper[place] = -np.inf, np.inf
            unclipped.append(feature.name)
        moved.append(_scaling(feature, (lower[place], upper[place]), scale))
    center, width = zip(*moved, strict=True)
    return ColumnRule(
        name=name,
        text=False,
        scalar=column.scalar,
        missing_values=column.missing_values,
        fill=_fill_values(column, missing),
        lower=tuple(lower.tolist()),
        upper=tuple(upper.tolist()),
        center=center,
        width=width,
    )


def _scaling(
    feature: Feature, limits: tuple[float, float], scale: str | None
) -> tuple[float, float]:
    """Returns what to subtract and to divide by; a constant feature becomes 0.

    The exact moments serve values that stay as they are. Otherwise they are those of
    the clipped values on record: outliers that are clipped don't stretch the scale.
    """
    if scale is None:
        return 0.0, 1.0
    low, high = (float(np.clip(end, *limits)) for end in (feature.min, feature.max))
    if scale == "minmax":
        return low, high - low or 1.0
    if (low, high) == (feature.min, feature.max):
        return feature.mean, feature.std or 1.0
    values = np.clip(np.array(feature.values), *limits)
    mean = float(np.average(values, weights=feature.weights))
    variance = float(np.average((values - mean) ** 2, weights=feature.weights))
    return mean, float(np.sqrt(variance)) or 1.0


def per_column(
    argument: str, option: Any, names: Iterable[str], default: Any
) -> dict[str, Any]:
    """Returns an option for each column, from one for all or a dict by column."""
    names = tuple(names)
    if not isinstance(option, Mapping):
        return dict.fromkeys(names, option)
    if unknown := tuple(name for name in option if name not in names):
        raise ValueError(
            f"`{argument}` names columns {unknown!r}; expected some of {names!r}. "
            "Correct the names."
        )
    return {name: option.get(name, default) for name in names}


def _fill_values(column: Column, missing: Any) -> tuple[float, ...]:
    """Returns what to write for a missing value of each feature; NaN for None."""
    if isinstance(missing, str):
        checks.choice("missing", missing, FILLS)
        values = [getattr(feature, missing) for feature in column.features]
        if None in values:
            raise ValueError(
                f"`missing` is 'mode', and no value of feature "
                f"{column.features[values.index(None)].name!r} stands out, as each "
                "occurs once; expected a most frequent one. Pass 'median' for column "
                f"{column.name!r}."
            )
        return tuple(values)
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


def _fill_text(column: TextColumn, missing: Any) -> str | None:
    """Returns what to write for a missing text, None to leave it."""
    if not column.missing_values or missing is None:
        return None
    if not isinstance(missing, str):
        raise ValueError(
            f"`missing` is {missing!r} for text column {column.name!r}; expected "
            "'mode', which is the most frequent text, or a text. Pass "
            f"`missing={{{column.name!r}: 'unknown'}}`."
        )
    return column.mode if missing in FILLS else missing


def check_rule(argument: str, rule: Any) -> tuple[str, tuple[float, ...]] | None:
    """Returns a rule about outliers as its name and numbers.

    It may be a name alone, a name with its numbers, or two quantiles alone.

    Example:
        >>> check_rule("clip", "iqr"), check_rule("clip", (0.01, 0.99))
        (('iqr', (1.5,)), ('quantile', (0.01, 0.99)))
    """
    if rule is None:
        return None
    parts = (rule,) if isinstance(rule, str) else rule
    forms = "None, ('zscore', 3.0), ('iqr', 1.5) or ('quantile', 0.01, 0.99)"
    if not (isinstance(parts, (tuple, list)) and len(parts)):
        raise TypeError(
            f"`{argument}` is {rule!r}, of type {type(rule).__name__}; expected "
            f"{forms}. Pass one of these."
        )
    name, *given = parts if isinstance(parts[0], str) else ("quantile", *parts)
    checks.choice(argument, name, _LEVELS)
    levels = given or _LEVELS[name]
    if len(levels) != len(_LEVELS[name]):
        raise ValueError(f"`{argument}` is {rule!r}; expected {forms}. Pass one.")
    if name != "quantile":
        return name, (checks.positive(argument, levels[0]),)
    low, high = (checks.fraction(argument, level) for level in levels)
    if low >= high:
        raise ValueError(
            f"`{argument}` is {rule!r}; expected a lower quantile below the upper "
            "one. Swap them."
        )
    return name, (low, high)


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
