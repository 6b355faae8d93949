"""What a metric's drop is below, on paired examples, and how many would show it.

Each example counts as its own control: both models answered it, so only examples on
which they differ tell anything.
"""

import math
from collections.abc import Callable

import numpy as np

from tfamp.trials.intervals import bounded_low
from tfamp.tuning.races import student_quantile

# Chance that the true drop lies above the upper bound, and below the lower one.
ERROR_RATE = 0.05
# Nobody labels more examples than this to settle half a percent.
_MOST_EXAMPLES = 10**6
_HALVINGS = 60


def upper_bound(worsening: np.ndarray, rate: float, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is below, but for a chance of `rate`.

    Args:
        worsening: Of each example, of shape (examples,), at least one.
        rate: The chance to be wrong.
        is_rate: Whether each is a difference of two numbers in [0, 1], as those of an
            accuracy are: then what was not seen may be there all the same. Where
            examples are only lost or kept, it is the exact limit of their fraction.

    Example:
        >>> round(upper_bound(np.zeros(360), 0.05, is_rate=True), 4)
        0.0083
        >>> won_and_lost = np.array([1.0] * 4 + [-1.0] * 4 + [0.0] * 992)
        >>> 0 < upper_bound(won_and_lost, 0.05, is_rate=True) < 0.008
        True

    Source: Clopper & Pearson, Biometrika 26, 1934; where examples are won too, Gaffke,
    see `tfamp.trials.intervals.bounded_low`, which is the same without any.
    """
    if is_rate:
        lost = int(np.count_nonzero(worsening == 1.0))
        if lost + np.count_nonzero(worsening == 0.0) == len(worsening):
            return fraction_limit(lost, len(worsening), rate)
        return -bounded_low(-worsening, rate)
    return _student(worsening, rate, 1.0)


def lower_bound(worsening: np.ndarray, rate: float, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is above, but for a chance of `rate`."""
    if is_rate:
        return bounded_low(worsening, rate)
    return _student(worsening, rate, -1.0)


def fraction_limit(lost: int, number: int, rate: float) -> float:
    """Returns the fraction of which at most `lost` are seen with a chance of `rate`.

    Example:
        >>> [round(fraction_limit(*each, 0.05), 5) for each in ((0, 598), (1, 947))]
        [0.005, 0.005]
    """
    if lost >= number:
        return 1.0
    counts = np.arange(lost + 1)
    logs = [
        math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
        for k in counts
    ]
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        terms = logs + counts * math.log(middle)
        terms = terms + (number - counts) * math.log1p(-middle)
        if float(np.exp(terms).sum()) > rate:
            low = middle
        else:
            high = middle
    return high


def examples_needed(
    worsening: np.ndarray, tolerance: float, rate: float, *, is_rate: bool
) -> int | None:
    """Returns how many examples would show a metric to be within a tolerance.

    Those that are added count as answered alike where examples are lost or won, and as
    scattered as those that are there otherwise.

    Returns:
        A number above `len(worsening)`; None where what was seen is beyond the
        tolerance, so that more would show the opposite.

    Example:
        >>> one_lost = np.eye(1, 360)[0]
        >>> [examples_needed(each, 0.005, 0.05, is_rate=True)
        ...  for each in (np.zeros(360), one_lost)]
        [598, 947]
        >>> examples_needed(np.ones(360), 0.005, 0.05, is_rate=True) is None
        True
    """
    mean = float(np.mean(worsening))
    if mean > tolerance or not math.isfinite(mean):
        return None
    if not is_rate:
        spread = float(np.std(worsening, ddof=1)) if len(worsening) > 1 else math.inf
        room = tolerance - mean
        if not (room > 0 and math.isfinite(spread)):
            return None
        return max(
            len(worsening) + 1,
            math.ceil((student_quantile(rate, 1000) * spread / room) ** 2),
        )

    def shows(number: int) -> bool:
        alike = np.zeros(number - len(worsening))
        joined = np.concatenate([worsening, alike])
        return upper_bound(joined, rate, is_rate=True) <= tolerance

    return _first(shows, len(worsening))


def _first(holds: Callable[[int], bool], low: int) -> int | None:
    """Returns the first number above `low` from which on something holds."""
    high = 2 * low
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST_EXAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _student(values: np.ndarray, rate: float, side: float) -> float:
    number, mean = len(values), float(np.mean(values))
    if number < 2:
        return side * math.inf
    spread = float(np.std(values, ddof=1))
    half = student_quantile(rate, number - 1) * spread / math.sqrt(number)
    return mean + side * half
