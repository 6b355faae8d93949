"""Which values stand for a missing one: NaN, and what the user declared."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# One value, several, or either by column.
MissingValues = Any


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
    missing_value: MissingValues, dtypes: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the missing values of each column.

    A number applies to the columns of numbers, a text to those of text.

    Args:
        missing_value: None, a number, a text, a sequence of them, or a dict of
            these by column.
        dtypes: The columns, with their NumPy dtypes (object for text).

    Raises:
        TypeError: A value is neither a number nor text.
        ValueError: A dict names a column that isn't there, or a value doesn't suit
            the column or any column.

    Example:
        >>> by_column((-999, "?"), {"age": np.dtype("f4"), "city": np.dtype("O")})
        {'age': (-999.0,), 'city': ('?',)}
    """
    by_name = per_column("missing_value", missing_value, dtypes, None)
    found = {name: _values(value) for name, value in by_name.items()}
    for name, values in found.items():
        only = {name: dtypes[name]} if isinstance(missing_value, Mapping) else dtypes
        _check_used(values, only)
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
    # Of ml_dtypes' bfloat16 the kind is "V"; integers can't be NaN.
    result = np.isnan(values) if values.dtype.kind not in "iub" else None
    result = np.zeros(values.shape, bool) if result is None else result
    for value in missing_values:
        if suits(value, values.dtype):
            result = result | (values == np.asarray(value).astype(values.dtype))
    return result


def _values(missing_value: Any) -> tuple[Any, ...]:
    """Returns one value or several as a tuple of floats and texts, without NaN."""
    if missing_value is None:
        return ()
    several = isinstance(missing_value, Iterable) and not isinstance(
        missing_value, (str, bytes)
    )
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


def _check_used(values: Sequence[Any], dtypes: Mapping[str, Any]) -> None:
    """Raises if a value can stand in none of the columns."""
    for value in values:
        if not any(suits(value, dtype) for dtype in dtypes.values()):
            kinds = {name: np.dtype(dtype).name for name, dtype in dtypes.items()}
            raise ValueError(
                f"`missing_value` {value!r} cannot occur in columns {kinds!r}; "
                "expected one that a column can hold. Correct it, or leave it out."
            )
