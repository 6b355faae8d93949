"""Every interval and bound of tfamp: of means, of ratios, of fractions and of answers.

One claim has one interval. Each of its ends errs with a chance of `ERROR_RATE`, so
"faster", "slower" and "equivalent" are each false in at most 5 % of the cases. SciPy
has these quantiles too, but `tfamp.tune` and `enable(policy="measure")` need no extra.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import tensorflow as tf

from tfamp.records.record import Record

ERROR_RATE = 0.05
# A gain of less than this is none: changing the policy has its own cost.
MIN_GAIN = 1.05
Effect = Literal["better", "worse", "as good", "same", "unclear", "one seed", ""]


@dataclasses.dataclass(frozen=True)
class Interval(Record):
    """An estimate (a mean, of ratios the geometric one) and where the truth may lie.

    It lies below `low` with a chance of at most `ERROR_RATE`, likewise above `high`.
    """

    estimate: float
    low: float
    high: float


def interval(
    values: Sequence[float] | np.ndarray, rate: float = ERROR_RATE
) -> Interval:
    """Returns the mean of values from a normal distribution, and its t-interval."""
    if not len(values):
        return Interval(math.nan, math.nan, math.nan)
    middle, half = float(np.mean(values)), math.inf
    if len(values) > 1:
        half = half_width(float(np.std(values, ddof=1)), len(values), rate)
    return Interval(middle, middle - half, middle + half)


def half_width(spread: float, number: int, rate: float = ERROR_RATE) -> float:
    """Returns half of the width of the t-interval of a number of values."""
    return student_quantile(rate, number - 1) * spread / math.sqrt(number)


def interval_of_ratios(ratios: Sequence[float]) -> Interval:
    """Returns the geometric mean of ratios above 0, and the interval of that."""
    found = interval(np.log(np.asarray(ratios, np.float64)))
    with np.errstate(over="ignore"):
        return Interval(*np.exp(dataclasses.astuple(found)).tolist())


def effect_of_ratio(found: Interval, *, more_is_better: bool) -> Effect:
    """Returns what the interval of a ratio comes to.

    A difference is said where the interval rules out none at all and the estimate is
    at least `MIN_GAIN` away from 1; "same" where such a difference is ruled out.
    """
    if not 0 < found.low <= found.high < math.inf:
        return "one seed"
    if 1 / MIN_GAIN < found.low and found.high < MIN_GAIN:
        return "same"
    is_more = found.low > 1 and found.estimate >= MIN_GAIN
    is_less = found.high < 1 and found.estimate <= 1 / MIN_GAIN
    if not (is_more or is_less):
        return "unclear"
    return "better" if is_more == more_is_better else "worse"


@functools.lru_cache(maxsize=4096)
def student_quantile(rate: float, degrees: int) -> float:
    """Returns what Student's t exceeds with a chance of `rate`, at most a half."""
    if degrees < 1:
        return math.inf
    x = _root(lambda x: _beta(x, degrees / 2, 0.5) > 2 * rate, 0.0, 1.0)
    return math.sqrt(degrees * (1 - x) / x)


@functools.lru_cache(maxsize=4096)
def difference_limit(lost: float, won: float, number: float, rate: float) -> float:
    """Returns what a true fraction lost minus won is below, of paired examples.

    Where nothing is won it is the exact limit of a binomial fraction. Else it is that
    of a score test, whose rate is at most 6 % above the one that was asked for.

    Source: Clopper & Pearson, Biometrika 26, 1934; Tango, Statistics in Medicine 17,
    1998.
    """
    if lost >= number:
        return 1.0
    z = statistics.NormalDist().inv_cdf(1 - rate)

    def is_ruled_out(difference: float) -> bool:
        if not won:  # the chance of as few lost is a beta distribution's
            return 1 - _beta(difference, lost + 1, number - lost) < rate
        a = 2 * number
        b = -lost - won + (2 * number - lost + won) * difference
        c = -won * difference * (1 - difference)
        share_won = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        variance = number * (2 * share_won + difference * (1 - difference))
        return number * difference - (lost - won) >= z * math.sqrt(max(variance, 0.0))

    return _root(is_ruled_out, (lost - won) / number, 1.0)


def change_limit(
    changes: np.ndarray, times: float = 1.0, rate: float = ERROR_RATE
) -> float:
    """Returns what the true mean of paired changes in [-1, 1] is below.

    `times` as many examples would show that. Changes of -1, 0 or 1 are counted as lost
    and won, means over seeds in parts of the size that weighs most in them.

    Example:
        >>> round(change_limit(np.zeros(598)), 5)
        0.005
    """
    sizes = np.abs(changes)
    weight, squares = times * float((sizes**3).sum()), times * float((sizes**2).sum())
    # Of one more example, which changed as a whole, the size is 1.
    scale = times * (squares + 1) / (weight + 1)
    lost, won = float(changes[changes > 0].sum()), -float(changes[changes < 0].sum())
    return difference_limit(lost * scale, won * scale, len(changes) * scale, rate)


def _beta(x: float, a: float, b: float) -> float:
    """Returns the regularized incomplete beta function."""
    with tf.device("CPU:0"):
        return float(tf.math.betainc(*(tf.constant(v, tf.float64) for v in (a, b, x))))


def _root(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Returns where a condition that holds at `high` begins to, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
