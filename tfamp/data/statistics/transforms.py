"""Transforms that pull in long tails: the same formulas on arrays and on tensors.

All are monotonic, so clipping before one or behind it takes the same values.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.records import checks

TRANSFORMS = ("log1p", "signed_log", "yeo-johnson")
# Enough values for a lambda that is stable to two digits.
_FITTED_VALUES = 2_000


def transform_array(values: np.ndarray, kind: str | None, power: Any = 1.0) -> Any:
    """Returns transformed float64 values.

    Args:
        values: Any shape; the last axis holds the features.
        kind: "log1p": log(1 + x). "signed_log": sign(x) log(1 + |x|).
            "yeo-johnson": a power of 1 + x above 0 and of 1 - x below; values are to
            be standardized before it. None: as is.
        power: Lambda of Yeo-Johnson, a number or `(features,)`.

    Example:
        >>> transform_array(np.array([-1.0, 1.0]), "signed_log").round(3)
        array([-0.693,  0.693])

    Source: Yeo and Johnson, A New Family of Power Transformations, 2000, equation
        2.1.
    """
    if kind == "log1p":
        return np.log1p(values)
    if kind == "signed_log":
        return np.sign(values) * np.log1p(np.abs(values))
    if kind == "yeo-johnson":
        return _yeo_johnson(values, np.asarray(power), np)
    return values


def transform_tensor(
    values: tf.Tensor, kind: str | None, power: tf.Tensor
) -> tf.Tensor:
    """Returns transformed values, as `transform_array`, in the dtype of `values`."""
    if kind == "log1p":
        return tf.math.log1p(values)
    if kind == "signed_log":
        return tf.sign(values) * tf.math.log1p(tf.abs(values))
    if kind == "yeo-johnson":
        return _yeo_johnson(values, power, tf)
    return values


def fit_power(values: np.ndarray, weights: np.ndarray) -> float:
    """Returns the lambda of Yeo-Johnson that makes values most like a normal.

    It is scikit-learn's maximum likelihood estimate on 2,000 quantiles.

    Args:
        values: Ascending, `(values,)`.
        weights: How many each stands for.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    preprocessing = checks.require(
        "sklearn.preprocessing", extra="data", purpose="`transform='yeo-johnson'`"
    )
    middles = (np.arange(_FITTED_VALUES) + 0.5) / _FITTED_VALUES
    upto = np.cumsum(weights)
    sample = values[np.searchsorted(upto, middles * upto[-1])]
    if sample[0] == sample[-1]:
        return 1.0
    fitted = preprocessing.PowerTransformer("yeo-johnson", standardize=False)
    return float(fitted.fit(sample[:, None]).lambdas_[0])


def _yeo_johnson(values: Any, power: Any, library: ModuleType) -> Any:
    """Returns the transform by NumPy's or TensorFlow's functions of the same names."""
    log1p: Callable[[Any], Any] = library.math.log1p if library is tf else np.log1p
    expm1: Callable[[Any], Any] = library.math.expm1 if library is tf else np.expm1

    def powered(magnitude: Any, exponent: Any) -> Any:
        # ((1 + m) ** e - 1) / e, whose limit at e = 0 is log(1 + m).
        logs = log1p(magnitude)
        safe = library.where(exponent == 0, library.ones_like(exponent), exponent)
        return library.where(exponent == 0, logs, expm1(safe * logs) / safe)

    # Both branches are computed, so each gets values that it is defined for.
    above = powered(library.maximum(values, library.zeros_like(values)), power)
    below = powered(library.maximum(-values, library.zeros_like(values)), 2 - power)
    return library.where(values >= 0, above, -below)
