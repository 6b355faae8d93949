"""What fills a missing value, and where an outlier begins."""

import math
import numbers
from typing import Any

import numpy as np

from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.records import checks

FILLS = ("mean", "median", "mode")
RULES = ("zscore", "iqr", "quantile")
# Three standard deviations keep 99.7 % of a normal; 1.5 quartile ranges are Tukey's
# fences (Exploratory Data Analysis, 1977, chapter 2) and keep 99.3 %.
_ZSCORE, _IQR, _QUANTILES = 3.0, 1.5, (0.01, 0.99)


def check_fill(missing: Any) -> Any:
    """Returns what `missing` asks for, if it is a fill.

    Raises:
        TypeError: It is neither a name, a number nor None.
        ValueError: It is an unknown name, or not finite.
    """
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
    """Returns what to write for a missing value, `(features,)`; NaN for None.

    Args:
        column: The statistics.
        missing: "mean", "median", "mode", a number, or None.

    Raises:
        ValueError: The mode of a feature is open.
    """
    missing = check_fill(missing)
    if missing is None or not isinstance(missing, str):
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

    Text has no mean and no median: with those, as with "mode", it is the most
    frequent text. Another text stands for itself.

    Raises:
        ValueError: `missing` is a number, or no text is the most frequent.
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

    Args:
        argument: The argument's name, for messages.
        rule: None, "zscore", "iqr", "quantile", one of these with its numbers, as
            ("zscore", 3.0), ("iqr", 1.5), ("quantile", 0.01, 0.99), or the two
            quantiles alone.

    Raises:
        TypeError: It is something else.
        ValueError: A number is out of range.

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
    name, given = ("quantile", parts)
    if isinstance(parts[0], str):
        name, given = checks.choice(argument, parts[0], RULES), parts[1:]
    if name == "quantile":
        given = given or _QUANTILES
        if len(given) != 2:
            raise ValueError(
                f"`{argument}` is {rule!r}; expected two quantiles. Pass both, as in "
                f"`{argument}=(0.01, 0.99)`."
            )
        low, high = given
        low = checks.fraction(argument, low)
        high = checks.fraction(argument, high)
        if low >= high:
            raise ValueError(
                f"`{argument}` is {rule!r}; expected a lower quantile below the upper "
                "one. Swap them."
            )
        return name, (low, high)
    if len(given) > 1:
        raise ValueError(
            f"`{argument}` is {rule!r}; expected one number behind {name!r}. Leave out "
            "the rest."
        )
    default = _ZSCORE if name == "zscore" else _IQR
    return name, (checks.positive(argument, given[0] if given else default),)


def outlier_limits(column: Column, rule: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lowest and highest value that is no outlier, each `(features,)`.

    Args:
        column: The statistics.
        rule: As `check_rule` returns it; None for no limit.
    """
    features = column.features
    if rule is None:
        unlimited = np.full(len(features), np.inf)
        return -unlimited, unlimited
    name, levels = rule
    if name == "quantile":
        pairs = [tuple(feature.quantile(q) for q in levels) for feature in features]
    elif name == "zscore":
        width = levels[0]
        pairs = [(f.mean - width * f.std, f.mean + width * f.std) for f in features]
    else:
        quartiles = [(f.quantile(0.25), f.quantile(0.75)) for f in features]
        pairs = [
            (low - levels[0] * (high - low), high + levels[0] * (high - low))
            for low, high in quartiles
        ]
    lower, upper = np.array(pairs, np.float64).T
    return lower, upper


def collapses(feature: Feature, lower: float, upper: float) -> bool:
    """Whether limits leave a feature that varies with one value."""
    left = max(lower, feature.min) < min(upper, feature.max)
    return not feature.is_constant and not left
