"""Intervals: where a mean may lie that was estimated from a few seeds and examples.

Who measures until a claim comes up will find one: with looks after 3, 5, 8 and 12 seeds
an interval that errs in 5 % of all comparisons errs in 12 %. So every look spends a
part of `ERROR_RATE` (alpha spending): the first one half of it, 2.5 %, each further one
a third of that before, 0.83 %, 0.28 % and so on, however many there are.

That adds up to 3.75 %, and the rest is needed: the number of seeds of a look may be
chosen by the last look, as the advice on more seeds does, and then the look errs more
often than it spends. Whoever chooses them so as to err as often as possible comes to
4.4 %; spending half of what is left at each look, they would come to 6.6 % (computed by
dynamic programming, `benchmarks/verdict_rates.py`).

Seeds share one validation set, so their spread does not show how far another set of as
many examples would have differed. The examples show it: the mean over seeds of what a
policy changes on each of them is a sample of independent values. Its interval and that
of the seeds are joined by adding squares. That counts the part of the spread which
examples and seeds have in common twice, so it errs to the wide side.

Source: Slud & Wei, Two-sample repeated significance tests based on the modified
Wilcoxon statistic, JASA 77, 1982; Lan & DeMets, Discrete sequential boundaries for
clinical trials, Biometrika 70, 1983; Proschan & Hunsberger, Designed extension of
studies based on conditional power, Biometrics 51, 1995. Of the sum of squares:
Newcombe, Interval estimation for the difference between independent proportions,
Statistics in Medicine 17, 1998; Zou & Donner, Construction of confidence limits about
effect measures, Statistics in Medicine 27, 2008.
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
# Halvings until the search for a bound stands still.
_HALVINGS = 50
# Mean and rare values are alike where the tail is about a half; nobody asks for that.
_WIDEST = 3.0


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
    """Returns the geometric mean of ratios above 0 and its t-interval.

    Of one nothing is known but itself, so its interval is without end; of none all is
    NaN.

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


@dataclasses.dataclass(frozen=True)
class PairedExamples:
    """Metric of each example under a policy minus that under the reference.

    The shape is (seeds, examples); above 0 the policy is better. They are bounded where
    they lie in [-1, 1], as those of an accuracy do.
    """

    differences: np.ndarray
    is_bounded: bool

    @property
    def number(self) -> int:
        """How many examples there are."""
        return int(self.differences.shape[1])

    def reach(self, rate: float) -> tuple[float, float]:
        """Returns how far below and above its estimate the true difference may lie."""
        values = np.asarray(np.mean(self.differences, axis=0, dtype=np.float64))
        middle = float(np.mean(values))
        if not self.is_bounded:
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.inf
            half = half_width(spread, max(len(values), 2), rate)
            return half, half
        low, high = bounded_low(values, rate), -bounded_low(-values, rate)
        return max(middle - low, 0.0), max(high - middle, 0.0)

    def shrinkage(self, num_seeds: np.ndarray) -> np.ndarray:
        """Returns which part of that other numbers of seeds would leave."""
        own = len(self.differences)
        whole = float(np.var(np.mean(self.differences, axis=0, dtype=np.float64)))
        if own < 2 or not whole:
            return np.ones(len(num_seeds))
        # What seeds change on an example goes with their number, the rest stays.
        within = float(np.mean(np.var(self.differences, axis=0, ddof=1)))
        rest = max(whole - within / own, 0.0)
        return np.sqrt((rest + within / num_seeds) / (rest + within / own))


@dataclasses.dataclass(frozen=True)
class Fractions:
    """Means in [0, 1] under the reference and the policy, of unknown examples.

    Both are taken for fractions of separate examples. Right and wrong answers of two
    policies go together, so that is wider than it need be.
    """

    before: float
    after: float
    number: int
    is_bounded: bool = True

    def reach(self, rate: float) -> tuple[float, float]:
        """Returns how far below and above its estimate the true difference may lie."""
        (low, high), (least, most) = (
            fraction_limits(mean, self.number, rate)
            for mean in (self.before, self.after)
        )
        below = math.hypot(self.after - least, high - self.before)
        return below, math.hypot(most - self.after, self.before - low)

    def shrinkage(self, num_seeds: np.ndarray) -> np.ndarray:
        """Returns which part of that other numbers of seeds would leave: all of it."""
        return np.ones(len(num_seeds))


# What a number of examples leaves open.
Sampling = PairedExamples | Fractions


def quality_of(
    differences: Sequence[float],
    rate: float,
    sampling: Sampling | None = None,
    *,
    resolution: float = 0.0,
) -> Interval:
    """Returns the interval of a metric's difference, over seeds and examples.

    `rate` is the chance that the true difference lies below, and that it lies above;
    `resolution` the least difference that the metric can show.
    """
    found = interval(differences, rate, resolution=resolution)
    if sampling is None:
        return found
    half = found.estimate - found.low
    below, above = (math.hypot(half, each) for each in sampling.reach(rate))
    return Interval(found.estimate, found.estimate - below, found.estimate + above)


def fraction_limits(mean: float, number: int, rate: float) -> tuple[float, float]:
    """Returns the exact limits of a fraction that was seen in `number` examples.

    Example:
        >>> low, high = fraction_limits(1.0, 50, 0.05)
        >>> round(low, 3), high
        (0.942, 1.0)

    Source: Clopper & Pearson, The use of confidence or fiducial limits illustrated in
    the case of the binomial, Biometrika 26, 1934.
    """
    stats = checks.require("scipy.stats", extra="report", purpose="`tfamp.compare`")
    hits = mean * number
    misses = number - hits
    low = float(stats.beta.ppf(rate, hits, misses + 1)) if hits > 0 else 0.0
    high = float(stats.beta.isf(rate, hits + 1, misses)) if misses > 0 else 1.0
    return low, high


def bounded_low(values: Sequence[float] | np.ndarray, rate: float) -> float:
    """Returns what the true mean of values in [-1, 1] is below with a chance of `rate`.

    The values and one more, the worst that there can be, get random weights that add up
    to 1 (uniform spacings); the bound is the quantile of their weighted mean. Of values
    that are all -1 or 0 it is the exact limit of a fraction; of many that scatter it
    comes to the t-interval. It needs no distribution, and ties make it no narrower than
    they should. The quantile is a saddlepoint approximation, which is within 1 % of it.

    Example:
        >>> -1 < bounded_low([0.0] * 50, 0.05) < -0.058
        True

    Source: Gaffke, Three test statistics for a nonparametric one-sided hypothesis on
    the mean of a nonnegative variable, Mathematical Methods of Statistics 14, 2005;
    Learned-Miller & Thomas, A new confidence interval for the mean of a bounded random
    variable, arXiv:1905.06208, 2019; Lugannani & Rice, Saddle point approximation for
    the distribution of the sum of independent random variables, 1980.
    """
    found, counts = np.unique(np.round(values, 9), return_counts=True)
    return _bounded_low(tuple(found.tolist()), tuple(counts.tolist()), rate)


@functools.lru_cache(maxsize=128)
def _bounded_low(
    values: tuple[float, ...], counts: tuple[int, ...], rate: float
) -> float:
    worst = -1.0
    if max(values) <= worst:
        return worst
    places = np.append(values, worst)
    weights = np.append(counts, 1.0)

    def at(logarithm: float) -> tuple[float, float]:
        """Returns a mean and the chance of one below it, by a parameter of both."""
        beyond = math.exp(logarithm)
        tilted = weights / (places - worst + beyond)
        mean = float(tilted @ places / tilted.sum())
        terms = (mean - places) / (mean - worst + beyond)
        root = -math.sqrt(max(2 * float(weights @ np.log1p(-terms)), 1e-300))
        slope = -math.sqrt(float(weights @ (terms / (1 - terms)) ** 2))
        density = math.exp(-root * root / 2) / math.sqrt(2 * math.pi)
        tail = 0.5 * math.erfc(-root / math.sqrt(2))
        return mean, tail + density * (1 / root - 1 / slope)

    # The further beyond the worst value, the closer to the mean of all.
    low, high = -60.0, _WIDEST
    while at(high)[1] < rate:
        high += 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[1] < rate else (low, middle)
    return at(low)[0]
