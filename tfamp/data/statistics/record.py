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
from tfamp.data.statistics.conditioning import ColumnRule, Condition, suits
from tfamp.records import checks, console, units
from tfamp.records.record import Record, TableRecord

FILLS = ("mean", "median", "mode")
# Three standard deviations keep 99.7 % of a normal; 1.5 quartile ranges are Tukey's
# fences (Exploratory Data Analysis, 1977, chapter 2) and keep 99.3 %.
_LEVELS = {"zscore": (3.0,), "iqr": (1.5,), "quantile": (0.01, 0.99)}
_MAX_ROWS = 60
_TITLES = "Missing,Inf,Mean,Std,Min,1 %,Median,99 %,Max,Mode".split(",")
SCALES = ("standardize", "minmax")
_DEFAULTS = {"missing": "mean", "clip": (0.01, 0.99), "scale": "standardize"}


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
        mode: The most frequent value, the smallest of several; None where it is
            open: no value occurs twice, or none leads in the sample by more than
            chance.
        mode_count: How often it occurs; an estimate where `distinct` is None.
        distinct: How many values differ; None where a sample stands for all rows.
        values: Values in ascending order that stand for all.
        weights: How many each stands for.
        rank_error: By how much the rank of a quantile may be off, as a fraction of
            `count`, with a probability of 99.9 %; 0 where quantiles are exact.
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
    mode_count: int | None
    distinct: int | None
    values: tuple[float, ...] = dataclasses.field(repr=False)
    weights: tuple[int, ...] = dataclasses.field(repr=False)
    rank_error: float

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
        if not 0 <= q <= 1:
            raise ValueError(
                f"`q` is {q!r}; expected a fraction in [0, 1]. Pass 0.5 for the median."
            )
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
        distinct: How many values differ; None where a sample stands for all rows.
        values: The values, the most frequent first, at most 10,000; bytes that are no
            UTF-8 are written with backslashes.
        counts: How often each occurs.
        count_error: By how much a count may be off, with a probability of 99.9 %; 0
            where counts are exact.
        mode: The most frequent value, None where it is open.
    """

    name: str
    scalar: bool
    missing_values: tuple[str, ...]
    count: int
    missing: int
    distinct: int | None
    values: tuple[str, ...] = dataclasses.field(repr=False)
    counts: tuple[int, ...] = dataclasses.field(repr=False)
    count_error: int
    mode: str | None

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
        reading: Whether elements were taken as batches, and why.

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
    reading: str

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
        names = tuple(column.name for column in chosen)
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
        lines.append(f"{self.num_examples:,} examples; {self.reading}.")
        return "\n".join(lines)


def _rows(column: Column | TextColumn) -> list[tuple[str, ...]]:
    """Returns the table's rows of a column, one for each feature."""
    if isinstance(column, TextColumn):
        total = column.count + column.missing
        distinct = "many" if column.distinct is None else f"{column.distinct:,}"
        share = units.format_share(column.missing / total)
        text = f"{column.name} (text, {distinct} distinct)"
        return [(text, share, *("",) * 8, column.mode or "open")]
    rows = []
    for feature in column.features:
        total = feature.count + feature.missing + feature.infinite
        name = f"{feature.name} (constant)" if feature.is_constant else feature.name
        share = units.format_share(feature.missing / total)
        low, high = feature.quantile(0.01), feature.quantile(0.99)
        values = (feature.mean, feature.std, feature.min, low, feature.median, high)
        numbers = (f"{value:.4g}" for value in (*values, feature.max))
        mode = "open" if feature.mode is None else f"{feature.mode:.4g}"
        rows.append((name, share, f"{feature.infinite:,}", *numbers, mode))
    return rows


def _rule(
    column: Column | TextColumn, options: Mapping[str, Any], unclipped: list[str]
) -> ColumnRule:
    """Returns the rule of a column by its `missing`, `clip` and `scale`.

    Features that clipping would have made constant are added to `unclipped`.
    """
    if isinstance(column, TextColumn):
        return declared(column, fill_text=fill_text(column, options["missing"]))
    scale = options["scale"]
    if scale is not None:
        checks.choice("scale", scale, SCALES)
    fill = fill_values(column, options["missing"])
    lower, upper = outlier_limits(column, check_rule("clip", options["clip"]))
    moved = []
    for place, feature in enumerate(column.features):
        if collapses(feature, lower[place], upper[place]):
            lower[place], upper[place] = -np.inf, np.inf
            unclipped.append(feature.name)
        moved.append(_scaling(feature, (lower[place], upper[place]), scale))
    center, width = zip(*moved, strict=True)
    limits = {"lower": tuple(lower.tolist()), "upper": tuple(upper.tolist())}
    return declared(
        column, fill=tuple(fill.tolist()), center=center, width=width, **limits
    )


def declared(column: Column | TextColumn, **given: Any) -> ColumnRule:
    """Returns a rule about a column, and what stands for a missing value in it."""
    if isinstance(column, TextColumn):
        given["missing_texts"] = column.missing_values
    else:
        given["missing_values"] = column.missing_values
        # Without another fill, these numbers say how many features there are.
        given.setdefault("fill", (math.nan,) * len(column.features))
    is_text = isinstance(column, TextColumn)
    return ColumnRule(name=column.name, text=is_text, scalar=column.scalar, **given)


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
    """Returns an option for each column, from one for all or a dict by column.

    Example:
        >>> per_column("missing", {"age": 0}, ("age", "pay"), "mean")
        {'age': 0, 'pay': 'mean'}
    """
    names = tuple(names)
    if not isinstance(option, Mapping):
        return dict.fromkeys(names, option)
    if unknown := tuple(name for name in option if name not in names):
        raise ValueError(
            f"`{argument}` names columns {unknown!r}; expected some of {names!r}. "
            "Correct the names."
        )
    return {name: option.get(name, default) for name in names}


def by_column(
    missing_value: Any, dtypes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the missing values of each column, numbers for numbers, texts for text.

    `missing_value` is as for `fit_statistics`; columns come with their NumPy dtypes,
    object for text.

    Example:
        >>> by_column((-999, "?"), {"age": np.dtype("f4"), "city": np.dtype("O")})
        {'age': (-999.0,), 'city': ('?',)}
    """
    by_name = per_column("missing_value", missing_value, dtypes, None)
    found = {name: _values(value) for name, value in by_name.items()}
    for name, values in found.items():
        # Of values for all columns each has to suit one of them.
        only = {name: dtypes[name]} if isinstance(missing_value, Mapping) else dtypes
        for value in values:
            if not any(suits(value, dtype) for dtype in only.values()):
                kinds = {name: np.dtype(dtype).name for name, dtype in only.items()}
                raise ValueError(
                    f"`missing_value` {value!r} cannot occur in columns {kinds!r}; "
                    "expected one that a column can hold. Correct it, or leave it out."
                )
    return {
        name: tuple(value for value in values if suits(value, dtypes[name]))
        for name, values in found.items()
    }


def _values(missing_value: Any) -> tuple[Any, ...]:
    """Returns one value or several as a tuple of floats and texts, without NaN."""
    if missing_value is None:
        return ()
    is_one = isinstance(missing_value, (str, bytes))
    several = isinstance(missing_value, Iterable) and not is_one
    values = tuple(missing_value) if several else (missing_value,)
    for value in values:
        if not isinstance(value, (str, numbers.Real)):
            raise TypeError(
                f"`missing_value` holds {value!r}, of type {type(value).__name__}; "
                "expected numbers or text. Pass what stands for a missing value, "
                "such as -999 or '?'; NaN always does."
            )
    converted = (v if isinstance(v, str) else float(v) for v in values)
    return tuple(v for v in converted if isinstance(v, str) or not math.isnan(v))


def check_fill(missing: Any) -> Any:
    """Returns what `missing` asks for: one of `FILLS`, a finite number or None."""
    if missing is None or isinstance(missing, str):
        return missing and checks.choice("missing", missing, FILLS)
    if isinstance(missing, bool) or not isinstance(missing, numbers.Real):
        raise TypeError(
            f"`missing` is {missing!r}, of type {type(missing).__name__}; expected "
            f"one of {FILLS!r}, a number, or None. Pass 'median' if there are outliers."
        )
    if not math.isfinite(missing):
        raise ValueError(
            f"`missing` is {missing!r}; expected a finite number. Pass None to leave "
            "missing values as NaN."
        )
    return float(missing)


def fill_values(column: Column, missing: Any) -> np.ndarray:
    """Returns what to write for a missing value, `(features,)`; NaN for None."""
    missing = check_fill(missing)
    if not isinstance(missing, str):
        value = math.nan if missing is None else missing
        return np.full(len(column.features), value)
    values = [getattr(feature, missing) for feature in column.features]
    for feature, value in zip(column.features, values, strict=True):
        if value is None:
            raise ValueError(
                f"`missing` is 'mode', and no value of feature {feature.name!r} stands "
                "out: each occurs once, or none clearly leads; expected a most "
                f"frequent one. Pass 'median' for column {column.name!r}."
            )
    return np.array(values, np.float64)


def fill_text(column: TextColumn, missing: Any) -> str | None:
    """Returns what to write for a missing text, None to leave it.

    With "mean" and "median", as with "mode", it is the most frequent text.
    """
    if not column.missing_values or missing is None:
        return None
    if isinstance(missing, str) and missing not in FILLS:
        return missing
    if isinstance(missing, str) and column.mode is not None:
        return column.mode
    raise ValueError(
        f"`missing` is {missing!r} for text column {column.name!r}; expected 'mode', "
        "where one text is the most frequent, or a text. Pass "
        f"`missing={{{column.name!r}: 'unknown'}}`."
    )


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
    if not (isinstance(parts, (tuple, list)) and len(parts)):
        raise TypeError(
            f"`{argument}` is {rule!r}, of type {type(rule).__name__}; expected None, "
            "('zscore', 3.0), ('iqr', 1.5) or ('quantile', 0.01, 0.99). Pass one of "
            "these."
        )
    name, *given = parts if isinstance(parts[0], str) else ("quantile", *parts)
    checks.choice(argument, name, _LEVELS)
    levels = given or _LEVELS[name]
    if len(levels) != len(_LEVELS[name]):
        expected = f"one number behind {name!r}. Leave out the rest"
        if name == "quantile":
            expected = f"two quantiles. Pass both, as in `{argument}=(0.01, 0.99)`"
        raise ValueError(f"`{argument}` is {rule!r}; expected {expected}.")
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


def collapses(feature: Feature, lower: float, upper: float) -> bool:
    """Whether limits leave a feature that varies with one value."""
    left = max(lower, feature.min) < min(upper, feature.max)
    return not feature.is_constant and not left
