"""Says whether a policy is as accurate as another one and faster, or what is missing.

Runs are paired by seed: the same seed under both policies starts from the same weights
and sees the same batches, so what a seed does to both cancels in the difference.

Quality is judged by two one-sided t-tests on the paired differences (TOST), which come
to looking where the t-interval lies: not by "no significant difference", which any test
with few seeds would grant. A t-interval rather than a bootstrap, since three to ten
seeds are too few to resample: a bootstrap interval of five values covers far less than
it states.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tfamp import _checks
from tfamp.results import Record

Answer = Literal[
    "equivalent and faster", "equivalent, not faster", "worse", "undecided"
]
# Chance of each false claim: "equivalent" for a policy that is worse by the tolerance
# or more, "worse" for one that is not, "faster" for one that is not.
ERROR_RATE = 0.05
MIN_SEEDS = 2
# A gain of less than this is none: changing the policy has its own cost.
MIN_GAIN = 1.05
# Beyond so many seeds more of them is no advice.
MAX_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class Interval(Record):
    """An estimate and where the true value may lie.

    Args:
        estimate: The mean over seeds; of ratios the geometric mean.
        low: Lower end; the true value lies below it with a chance of `ERROR_RATE`.
        high: Upper end, likewise above it.
    """

    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Verdict(Record):
    """What a comparison of two policies comes to.

    Args:
        answer: "equivalent and faster", "equivalent, not faster", "worse" or
            "undecided".
        reason: Why, in one sentence with its figures.
        quality: Of the difference of the metric, above 0 where the policy is better.
        speed: Of the ratio of examples/s, above 1 where the policy is faster.
        tolerance: The loss of quality that counts as none.
        num_seeds: Pairs of runs.
        more_seeds: How many more would decide, if they come out like these; None where
            it is decided, or where more seeds would not help.
    """

    answer: Answer
    reason: str
    quality: Interval
    speed: Interval
    tolerance: float
    num_seeds: int
    more_seeds: int | None = None

    @property
    def is_as_good(self) -> bool:
        """Whether the metric is shown to lose no more than is allowed."""
        return self.quality.low >= -self.tolerance

    def __str__(self) -> str:
        """Returns the answer and the reason."""
        if self.more_seeds is None:
            return f"{self.answer}; {self.reason}"
        noun = "seed" if self.more_seeds == 1 else "seeds"
        return f"{self.answer}: needs {self.more_seeds} more {noun}; {self.reason}"


def judge(
    differences: Sequence[float], ratios: Sequence[float], *, tolerance: float
) -> Verdict:
    """Returns the verdict on a policy against a reference.

    Worse means worse by more than `tolerance`; a policy that is better is equivalent.
    Not faster means that a gain of `MIN_GAIN` or more can be ruled out, however sure a
    smaller one is. Each false
    claim has a chance of at most 5 %, if differences and logarithms of ratios are about
    normal.

    Args:
        differences: Metric under the policy minus that under the reference, one for
            each seed, signed so that above 0 is better.
        ratios: Examples/s under the policy over that under the reference, likewise.
        tolerance: The loss of the metric that counts as none, above 0.

    Raises:
        ImportError: SciPy is not installed.
        TypeError: `tolerance` is no number.
        ValueError: Fewer than two seeds, different numbers of both, a value that is
            not finite, or a ratio or tolerance of 0 or less.

    Example:
        >>> judge([0.001, -0.001, 0.0], [1.9, 2.0, 2.1], tolerance=0.005).answer
        'equivalent and faster'
        >>> judge([-0.02, -0.021, -0.019], [2.0, 2.0, 2.1], tolerance=0.005).answer
        'worse'
        >>> print(str(judge([0.01, -0.01], [2.0, 2.1], tolerance=0.005)).split(";")[0])
        undecided: needs 22 more seeds

    Source: Schuirmann, A comparison of the two one-sided tests procedure and the power
    approach for assessing the equivalence of average bioavailability, 1987.
    """
    tolerance = _checks.positive("tolerance", tolerance)
    quality = interval(_finite("differences", differences))
    _finite("ratios", ratios, is_positive=True)
    if len(differences) != len(ratios):
        raise ValueError(
            f"`differences` has {len(differences)} values and `ratios` "
            f"{len(ratios)}; expected one of each for every seed. Pass the figures of "
            "the same runs."
        )
    speed = interval_of_ratios(ratios)
    more = None
    if quality.high < -tolerance:
        answer: Answer = "worse"
        reason = f"the metric loses {-quality.high:.4g} or more, {_allowed(tolerance)}"
    elif quality.low < -tolerance:
        answer = "undecided"
        reason = (
            f"the metric may lose {-quality.low:.4g} or change by {quality.high:+.4g}, "
            f"{_allowed(tolerance)}"
        )
        more = more_seeds(differences, tolerance=tolerance)
    else:
        lost = max(0.0, -quality.low)
        reason = (
            f"the metric loses at most {lost:.4g}, {_allowed(tolerance)}; "
            f"{_times(speed)} as many examples/s"
        )
        if speed.high < MIN_GAIN:
            answer = "equivalent, not faster"
        elif speed.low > 1:
            answer = "equivalent and faster"
        else:
            answer = "undecided"
            reason = f"as accurate, but maybe faster and maybe not: {reason}"
            more = more_seeds_for_speed(ratios)
    return Verdict(answer, reason, quality, speed, tolerance, len(ratios), more)


def interval(
    values: Sequence[float] | np.ndarray, rate: float = ERROR_RATE
) -> Interval:
    """Returns the mean of values from a normal distribution, and its t-interval.

    Args:
        values: At least two.
        rate: Chance that the true mean lies below it, and that it lies above.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(estimate=2.0, low=0.314..., high=3.685...)
    """
    values = np.asarray(values, np.float64)
    middle = float(np.mean(values))
    half = _half_width(float(np.std(values, ddof=1)), len(values), rate)
    return Interval(middle, middle - half, middle + half)


def interval_of_ratios(ratios: Sequence[float]) -> Interval:
    """Returns the geometric mean of ratios and its t-interval.

    Args:
        ratios: Above 0. Of one nothing is known but itself, so its interval is
            without end; of none all is NaN.

    Example:
        >>> interval_of_ratios([2.0, 2.0])
        Interval(estimate=2.0, low=2.0, high=2.0)
    """
    if not len(ratios):
        return Interval(math.nan, math.nan, math.nan)
    if len(ratios) == 1:
        return Interval(float(ratios[0]), 0.0, math.inf)
    found = interval(np.log(np.asarray(ratios, np.float64)))
    estimate, low, high = np.exp((found.estimate, found.low, found.high)).tolist()
    return Interval(estimate, low, high)


def more_seeds(differences: Sequence[float], *, tolerance: float) -> int | None:
    """Returns how many more seeds would decide, if mean and spread stay as they are.

    Returns:
        None where `MAX_SEEDS` would not be enough: the true loss is about the
        tolerance itself.
    """
    distance = abs(float(np.mean(differences)) + tolerance)
    return _more(differences, distance)


def more_seeds_for_speed(ratios: Sequence[float]) -> int | None:
    """Returns how many more seeds would tell faster from not faster, likewise."""
    logarithms = np.log(np.asarray(ratios, np.float64))
    middle = float(np.mean(logarithms))
    # From 1, to be faster; from the least gain, to be not.
    return _more(logarithms, max(middle, math.log(MIN_GAIN) - middle))


def _more(values: Sequence[float] | np.ndarray, distance: float) -> int | None:
    """Returns how many more values bring the interval's half width under a distance."""
    spread = float(np.std(values, ddof=1))
    for number in range(len(values) + 1, MAX_SEEDS + 1):
        if _half_width(spread, number, ERROR_RATE) < distance:
            return number - len(values)
    return None


def _half_width(spread: float, number: int, rate: float) -> float:
    stats = _checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    return float(stats.t.ppf(1 - rate, number - 1)) * spread / math.sqrt(number)


def _finite(
    argument: str, values: Sequence[float], *, is_positive: bool = False
) -> np.ndarray:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or len(array) < MIN_SEEDS:
        raise ValueError(
            f"`{argument}` is {values!r}; expected one number for each of at least "
            f"{MIN_SEEDS} seeds, since one run has no spread. Run more seeds."
        )
    if not np.isfinite(array).all() or (is_positive and (array <= 0).any()):
        kind = "finite numbers above 0" if is_positive else "finite numbers"
        raise ValueError(
            f"`{argument}` is {values!r}; expected {kind}. A run that ended in NaN has "
            "no quality to compare: find out why, or leave its seed out on both sides."
        )
    return array


def _allowed(tolerance: float) -> str:
    return f"where {tolerance:.4g} is allowed"


def _times(speed: Interval) -> str:
    return f"{speed.estimate:.3g} times ({speed.low:.3g} to {speed.high:.3g})"
