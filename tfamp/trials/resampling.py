"""What validation examples leave open, which all seeds have in common.

Seeds share one validation set, so their spread does not show how far another set of as
many examples would have differed. The examples show it: the mean over seeds of what a
policy changes on each of them is a sample of independent values. Its interval and that
of the seeds are joined by adding squares.

Source of the sum: Newcombe, Interval estimation for the difference between independent
proportions, Statistics in Medicine 17, 1998; Zou & Donner, Construction of confidence
limits about effect measures, Statistics in Medicine 27, 2008. It counts the part of the
spread that examples and seeds have in common twice, so it errs to the wide side.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tfamp.records import checks
from tfamp.trials.intervals import Interval, half_width, interval

# Halvings until the search for a bound stands still.
_HALVINGS = 50
# Mean and rare values are alike where the tail is about a half; nobody asks for that.
_WIDEST = 3.0


class Sampling(Protocol):
    """What a number of examples leaves open."""

    @property
    def number(self) -> int:
        """How many examples there are."""

    @property
    def is_bounded(self) -> bool:
        """Whether the metric of an example lies in [0, 1]."""

    def reach(self, rate: float) -> tuple[float, float]:
        """Returns how far below and above its estimate the true difference may lie."""

    def shrinkage(self, num_seeds: np.ndarray) -> np.ndarray:
        """Returns which part of that other numbers of seeds would leave."""


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
    below, above = sampling.reach(rate)
    half = found.estimate - found.low
    return Interval(
        found.estimate,
        found.estimate - math.hypot(half, below),
        found.estimate + math.hypot(half, above),
    )


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


def least_loss(number: int, rate: float) -> float:
    """Returns the least loss that examples of which none is lost can rule out.

    Example:
        >>> round(least_loss(50, 0.05), 3)
        0.058
    """
    return -math.expm1(math.log(rate) / number)


def examples_for(loss: float, rate: float) -> int:
    """Returns how many examples can rule a loss out, if none of them is lost.

    Example:
        >>> examples_for(0.005, 0.05)
        598
    """
    return math.ceil(math.log(rate) / math.log1p(-loss)) if loss < 1 else 1


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
