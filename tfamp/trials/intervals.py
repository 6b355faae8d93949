"""Intervals: where a mean may lie that was estimated from a few seeds.

Who measures until a claim comes up will find one: with looks after 3, 5, 8 and 12 seeds
an interval that errs in 5 % of all comparisons errs in 12 %. So every look spends a
part of `ERROR_RATE` (alpha spending): the first one half of it, 2.5 %, each further one
a third of that before, 0.83 %, 0.28 % and so on, however many there are.

That adds up to 3.75 %, and the rest is needed: the number of seeds of a look may be
chosen by the last look, as the advice on more seeds does, and then the look errs more
often than it spends. Whoever chooses them so as to err as often as possible comes to
4.4 %; spending half of what is left at each look, they would come to 6.6 % (computed by
dynamic programming, `benchmarks/verdict_rates.py`).

Source: Slud & Wei, Two-sample repeated significance tests based on the modified
Wilcoxon statistic, JASA 77, 1982; Lan & DeMets, Discrete sequential boundaries for
clinical trials, Biometrika 70, 1983; Proschan & Hunsberger, Designed extension of
studies based on conditional power, Biometrics 51, 1995.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tfamp.records import checks
from tfamp.records.record import Record

# Chance of each false claim, over all looks at a comparison together.
ERROR_RATE = 0.05
Effect = Literal["better", "worse", "as good", "same", "unclear", "one seed", ""]
# A gain of less than this is none: changing the policy has its own cost.
MIN_GAIN = 1.05


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
    stats = checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    return float(stats.t.isf(rate, degrees))


@functools.lru_cache(maxsize=64)
def quantiles(rate: float, most: int) -> np.ndarray:
    """Returns `quantile` for 1 to `most` degrees of freedom, by one call of SciPy."""
    stats = checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    found: np.ndarray = stats.t.isf(rate, np.arange(1, most + 1))
    return found


def effect_of_ratio(found: Interval, *, more_is_better: bool) -> Effect:
    """Returns what the interval of a ratio comes to.

    A difference is said where the interval rules out none at all and the estimate is
    at least `MIN_GAIN` away from it; "same" where a difference of `MIN_GAIN` is ruled
    out.

    Example:
        >>> effect_of_ratio(Interval(1.9, 1.8, 2.0), more_is_better=False)
        'worse'
        >>> effect_of_ratio(Interval(1.01, 1.0, 1.02), more_is_better=True)
        'same'
        >>> effect_of_ratio(Interval(1.0, 0.9, 1.1), more_is_better=True)
        'unclear'
    """
    if not all(map(math.isfinite, (found.estimate, found.low, found.high))):
        return "one seed"
    if 1 / MIN_GAIN < found.low and found.high < MIN_GAIN:
        return "same"
    if found.low > 1 and found.estimate >= MIN_GAIN:
        return "better" if more_is_better else "worse"
    if found.high < 1 and found.estimate <= 1 / MIN_GAIN:
        return "worse" if more_is_better else "better"
    return "unclear"


def rate_of(look: int, num_candidates: int = 1) -> float:
    """Returns the chance of a false claim that a look may have.

    Example:
        >>> [round(rate_of(look), 5) for look in (1, 2, 3)]
        [0.025, 0.00833, 0.00278]
    """
    return ERROR_RATE / 2 / 3 ** (look - 1) / num_candidates


def difference_rate_of(look: int, num_candidates: int = 1) -> float:
    """Returns the chance of a false claim of a difference, on each side.

    Of the error of a look a quarter goes to each of them: a better and a worse metric,
    a faster and a slower policy. With those of the other measures
    (`tfamp.comparison.evidence`) they come to 5 % for a report.
    """
    return rate_of(look, num_candidates) / 4
