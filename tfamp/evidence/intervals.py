"""Intervals: where a mean may lie that was estimated from a few seeds."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tfamp import _checks
from tfamp.results import Record

# Chance of each false claim, over all looks at a comparison together.
ERROR_RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Interval(Record):
    """An estimate and where the true value may lie.

    Args:
        estimate: The mean over seeds; of ratios the geometric mean.
        low: Lower end; the true value lies below it with a chance of at most
            `ERROR_RATE`.
        high: Upper end, likewise above it.
    """

    estimate: float
    low: float
    high: float


def interval(
    values: Sequence[float] | np.ndarray,
    rate: float = ERROR_RATE,
    *,
    resolution: float = 0.0,
) -> Interval:
    """Returns the mean of values from a normal distribution, and its t-interval.

    Args:
        values: At least two.
        rate: Chance that the true mean lies below it, and that it lies above.
        resolution: The least difference that values can show: a floor under their
            standard deviation, so that ties do not pass for certainty.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(estimate=2.0, low=0.314..., high=3.685...)
    """
    values = np.asarray(values, np.float64)
    middle = float(np.mean(values))
    spread = max(float(np.std(values, ddof=1)), resolution)
    half = half_width(spread, len(values), rate)
    return Interval(middle, middle - half, middle + half)


def interval_of_ratios(ratios: Sequence[float], rate: float = ERROR_RATE) -> Interval:
    """Returns the geometric mean of ratios and its t-interval.

    Args:
        ratios: Above 0. Of one nothing is known but itself, so its interval is
            without end; of none all is NaN.
        rate: As for `interval`.

    Example:
        >>> interval_of_ratios([2.0, 2.0])
        Interval(estimate=2.0, low=2.0, high=2.0)
    """
    if not len(ratios):
        return Interval(math.nan, math.nan, math.nan)
    if len(ratios) == 1:
        return Interval(float(ratios[0]), 0.0, math.inf)
    found = interval(np.log(np.asarray(ratios, np.float64)), rate)
    # A spread without end is no number that has an exponential.
    low, high = np.exp(np.clip((found.low, found.high), -700.0, 700.0)).tolist()
    return Interval(math.exp(found.estimate), low, high)


def half_width(spread: float, number: int, rate: float) -> float:
    """Returns half of the width of the t-interval of a number of values."""
    return quantile(rate, number - 1) * spread / math.sqrt(number)


@functools.lru_cache(maxsize=4096)
def quantile(rate: float, degrees: int) -> float:
    """Returns what Student's t exceeds with a chance of `rate`.

    Example:
        >>> round(quantile(0.05, 2), 3)
        2.92
    """
    stats = _checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    return float(stats.t.isf(rate, degrees))


@functools.lru_cache(maxsize=64)
def quantiles(rate: float, most: int) -> np.ndarray:
    """Returns `quantile` for 1 to `most` degrees of freedom, by one call of SciPy."""
    stats = _checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    found: np.ndarray = stats.t.isf(rate, np.arange(1, most + 1))
    return found
