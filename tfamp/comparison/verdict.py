"""Says whether a policy is as accurate as another one and faster, or what is missing.

Runs are paired by seed: what a seed does to both policies cancels in the difference.
Quality and speed are two answers, each from one interval (`tfamp.trials.statistics`).
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from tfamp.records.record import Record
from tfamp.records.units import join_words
from tfamp.trials import statistics
from tfamp.trials.statistics import MIN_GAIN, Effect, Interval

# Beyond so many seeds, or so many times the examples, more of them is no advice.
_MAX_SEEDS, _MAX_FACTOR = 100, 100
# The part of the examples' variance that is left out of the seeds'.
_COUNTED_TWICE = 0.85
# The best one last.
Answer = Literal[
    "worse", "slower", "undecided", "equivalent, not faster", "equivalent and faster"
]


@dataclasses.dataclass(frozen=True)
class Verdict(Record):
    """What a comparison of two policies comes to.

    `quality` is of the difference of the metric, above 0 where the policy is better,
    `speed` of the ratio of examples/s, above 1 where it is faster. Undecided ones say
    what would decide, in words (`needs`) and by number.
    """

    answer: Answer
    reason: str
    quality: Interval
    speed: Interval
    tolerance: float
    num_seeds: int
    needs: str = ""
    more_seeds: int | None = None
    num_examples: int = 0
    examples_needed: int | None = None
    tolerance_needed: float | None = None
    quality_effect: Effect = ""
    speed_effect: Effect = ""

    def __str__(self) -> str:
        """Returns the answer, the reason and what would decide."""
        needs = f"; {self.needs}" if self.needs else ""
        return f"{self.answer}; {self.reason}{needs}"


@dataclasses.dataclass(frozen=True)
class Examples:
    """What the validation examples, which all seeds share, leave open of a metric.

    `changes` are those of each example, the mean over seeds, above 0 where the policy
    is better, and in [-1, 1] where `is_rate`. `within` is the variance that examples
    give to the difference of one seed; more seeds take away the part `passing`.
    """

    changes: np.ndarray
    is_rate: bool
    within: float = 0.0
    passing: float = 0.0

    @classmethod
    def of(cls, changes: np.ndarray, *, is_rate: bool) -> "Examples":
        """Returns them of changes of shape (seeds, examples)."""
        seeds, number = changes.shape
        of_each = np.var(changes, axis=0, ddof=1) if seeds > 1 else np.zeros(number)
        within, means = float(of_each.mean()), changes.mean(axis=0)
        all_in_all = float(np.var(means))
        passing = min(within / seeds / all_in_all, 1.0) if all_in_all else 0.0
        return cls(means, is_rate, within / number, passing)

    @classmethod
    def of_fractions(cls, before: float, after: float, number: int) -> "Examples":
        """Returns them of two fractions, as if right answers came independently."""
        lost = round(before * (1 - after) * number)
        won = round(after * (1 - before) * number)
        changes = np.zeros(number)
        changes[:lost], changes[lost : lost + won] = -1, 1
        return cls(changes, is_rate=True)

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.changes)

    def reach(self, times: float = 1.0) -> tuple[float, float]:
        """Returns how far the true mean may lie below and above, of `times` as many."""
        middle = float(self.changes.mean())
        if self.is_rate:
            low = -statistics.change_limit(-self.changes, times)
            return middle - low, statistics.change_limit(self.changes, times) - middle
        spread = float(np.std(self.changes, ddof=1))
        half = statistics.half_width(spread, int(times * self.number))
        return half, half


def judge(
    differences: Sequence[float],
    ratios: Sequence[float],
    *,
    tolerance: float,
    examples: Examples | None = None,
) -> Verdict:
    """Returns the verdict on a policy against a reference, from values by seed.

    "Worse" is a loss beyond `tolerance`; a policy that is better is equivalent. What
    is slower is "slower" however good it is, unless it is worse. "Not faster" means
    that a gain of `MIN_GAIN` or more can be ruled out.

    Args:
        differences: Of the metric, above 0 where the policy is better.
        ratios: Of its examples/s to the reference's.
        tolerance: The loss that counts as none, in the metric's unit.
        examples: What the validation examples leave open; None where that is nothing.

    Example:
        >>> judge([0.001, -0.001, 0.0], [1.9, 2.0, 2.1], tolerance=0.005).answer
        'equivalent and faster'
        >>> judge([0.01, -0.01], [2.0, 2.1], tolerance=0.005).needs
        '24 seeds or a tolerance of 0.064 would decide'

    Source: Schuirmann, A comparison of the two one-sided tests procedure and the power
    approach for assessing the equivalence of average bioavailability, 1987.
    """
    quality = _quality(differences, examples)
    speed = statistics.interval_of_ratios(ratios)
    effect = _effect(quality, tolerance)
    speed_effect = statistics.effect_of_ratio(speed, more_is_better=True)
    lost = f"at most {-quality.low:.3g}" if quality.low < 0 else "nothing"
    reason = f"the metric loses {lost}"
    rest: dict[str, Any] = {}
    answer: Answer = "undecided"
    if effect == "worse":
        answer = "worse"
        reason = f"the metric loses {-quality.high:.3g} or more"
    elif effect == "unclear":
        reason = (
            f"the metric may lose {-quality.low:.3g} or change by {quality.high:+.3g}"
        )
        rest = _what_decides_quality(quality, differences, tolerance, examples)
    elif speed_effect == "better":
        answer = "equivalent and faster"
    elif speed.high < MIN_GAIN:
        answer = "equivalent, not faster"
    else:
        reason = f"as accurate, but maybe faster and maybe not: {reason}"
        rest = _what_decides_speed(ratios)
    if answer != "worse" and speed_effect == "worse":
        answer, rest = "slower", {"tolerance_needed": rest.get("tolerance_needed")}
    middle, low, high = (
        f"{value:#.3g}".rstrip(".") for value in dataclasses.astuple(speed)
    )
    return Verdict(
        answer,
        f"{reason}, where {tolerance:.3g} is allowed; {middle} times ({low} to {high}) "
        "as many examples/s",
        *(quality, speed, tolerance, len(ratios)),
        num_examples=0 if examples is None else examples.number,
        quality_effect=effect,
        speed_effect=speed_effect,
        **rest,
    )


def _effect(found: Interval, tolerance: float) -> Effect:
    """Returns what a difference of the metric comes to."""
    if found.high < -tolerance:
        return "worse"
    if found.low > tolerance:
        return "better"
    return "as good" if found.low >= -tolerance else "unclear"


def _quality(
    differences: Sequence[float],
    examples: Examples | None,
    *,
    reach: tuple[float, float] | None = None,
    seeds: int | None = None,
    times: float = 1.0,
) -> Interval:
    """Returns the interval of the difference over seeds and over examples.

    `seeds`, or `times` as many examples, are what it would be with more of these;
    `reach` is that of the examples, where it is known.

    Both parts are joined by adding squares. Most of what the examples alone make seeds
    differ by is left out of the seeds' part, else it would count twice; not all of it,
    since the spread of a few seeds may be small by chance, and of two seeds nothing.

    Source: Zou & Donner, Construction of confidence limits about effect measures,
    Statistics in Medicine 27, 2008.
    """
    middle, variance = float(np.mean(differences)), float(np.var(differences, ddof=1))
    number, within, below, above = len(differences), 0.0, 0.0, 0.0
    seeds = number if seeds is None else seeds
    if examples is not None:
        below, above = examples.reach(times) if reach is None else reach
        left = 1 - examples.passing + examples.passing * number / seeds
        below, above = math.sqrt(left) * below, math.sqrt(left) * above
        within = examples.within / times
        variance = max(variance - (examples.within - within), 0.0)
    own = variance - (_COUNTED_TWICE * within if seeds > 2 else 0.0)
    half = statistics.half_width(math.sqrt(max(own, 0.0)), seeds)
    below, above = math.hypot(half, below), math.hypot(half, above)
    return Interval(middle, middle - below, middle + above)


def _what_decides_quality(
    quality: Interval,
    differences: Sequence[float],
    tolerance: float,
    examples: Examples | None,
) -> dict[str, Any]:
    """Returns the fields of a verdict that say what would decide its quality."""
    number = len(differences)

    def decides(**more: Any) -> bool:
        found = _quality(differences, examples, **more)
        return _effect(found, tolerance) != "unclear"

    reach = None if examples is None else examples.reach()
    seeds = _first(lambda count: decides(seeds=count, reach=reach), number)
    needed = None
    if examples is not None:
        sizes = np.geomspace(1.0, _MAX_FACTOR, 64).tolist()
        place = bisect.bisect_left(sizes, True, key=lambda each: decides(times=each))
        if place < len(sizes):
            needed = int(_rounded_up(sizes[place] * examples.number))
    least = _rounded_up(-quality.low)
    ways = [f"{seeds} seeds"] * bool(seeds)
    ways += [f"{needed or 0:,} validation examples"] * bool(needed)
    ways.append(f"a tolerance of {least:.3g}")
    return {
        "needs": f"{join_words(ways, 'or')} would decide",
        "more_seeds": seeds and seeds - number,
        "examples_needed": needed,
        "tolerance_needed": least,
    }


def _what_decides_speed(ratios: Sequence[float]) -> dict[str, Any]:
    """Returns the fields of a verdict that say what would decide its speed."""
    logarithms = np.log(np.asarray(ratios, np.float64))
    middle, least = float(np.mean(logarithms)), math.log(MIN_GAIN)
    # From 1, to be faster; from the least gain, to be not.
    distance = middle if middle >= least else least - middle
    spread, number = float(np.std(logarithms, ddof=1)), len(ratios)
    seeds = _first(
        lambda count: statistics.half_width(spread, count) < distance, number
    )
    if seeds is None:
        return {"needs": "a machine with less noise would decide: the gain is small"}
    return {"needs": f"{seeds} seeds would decide", "more_seeds": seeds - number}


def _first(decides: Callable[[int], bool], number: int) -> int | None:
    """Returns the first number of seeds above one that decides."""
    return next(filter(decides, range(number + 1, _MAX_SEEDS + 1)), None)


def _rounded_up(value: float) -> float:
    """Returns a number above 0 with two digits, no smaller.

    Example:
        >>> _rounded_up(0.00731), _rounded_up(12340.0)
        (0.0074, 13000.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
