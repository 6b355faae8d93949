"""What the options of a column mean: missing values, fills, where outliers begin."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.records import checks

FILLS = ("mean", "median", "mode")
# Three standard deviations keep 99.7 % of a normal; 1.5 quartile ranges are Tukey's
# fences (Exploratory Data Analysis, 1977, chapter 2) and keep 99.3 %.
_DEFAULTS = {"zscore": (3.0,), "iqr": (1.5,), "quantile": (0.01, 0.99)}


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


def suits(value: Any, dtype: Any) -> bool:
    """Whether a column of this dtype can hold the value.

    Example:
        >>> suits(-999.0, np.uint8), suits(-1.0, np.int8), suits(0.1, np.float32)
        (False, True, True)
    """
    dtype = np.dtype(dtype)
    if isinstance(value, str) or dtype.kind not in "iub":
        return isinstance(value, str) == (dtype.kind in "OSU")
    if dtype.kind == "b":
        return value in (0, 1)
    limits = np.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max


def is_missing(values: np.ndarray, missing_values: Sequence[float]) -> np.ndarray:
    """Returns which numbers are NaN or one of the missing values.

    They are compared in the dtype of `values`, so that 0.1 finds a float32 0.1.

    Example:
        >>> is_missing(np.array([1.0, np.nan, -9.0], np.float32), (-9.0,))
        array([False,  True,  True])
    """
    # Integers can't be NaN; of ml_dtypes' bfloat16 the kind is "V".
    is_integer = values.dtype.kind in "iub"
    result = np.zeros(values.shape, bool) if is_integer else np.isnan(values)
    for value in missing_values:
        if suits(value, values.dtype):
            result = result | (values == np.asarray(value).astype(values.dtype))
    return result


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
    checks.choice(argument, name, _DEFAULTS)
    levels = given or _DEFAULTS[name]
    if len(levels) != len(_DEFAULTS[name]):
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
