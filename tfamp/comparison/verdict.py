"""Says whether a policy is as accurate as another one and faster, or what is missing.

Runs are paired by seed: the same seed under both policies starts from the same weights
and sees the same batches, so what a seed does to both cancels in the difference.

Quality is judged by two one-sided t-tests on the paired differences (TOST), which come
to looking where the t-interval lies: not by "no significant difference", which any test
with few seeds would grant. A t-interval rather than a bootstrap, since three to ten
seeds are too few to resample: a bootstrap interval of five values covers far less than
it states. What the validation examples leave open, which the seeds share, is added
(`tfamp.trials.intervals`), and looks at a comparison that goes on share
the error (`tfamp.trials.intervals`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tfamp.records.record import Record
from tfamp.trials.intervals import (
    MIN_GAIN,
    Effect,
    Interval,
    Sampling,
    difference_rate_of,
    effect_of_ratio,
    interval_of_ratios,
    quality_of,
    quantiles,
    rate_of,
)

# Beyond so many seeds more of them is no advice.
MAX_SEEDS = 1000
# The best one last.
Answer = Literal[
    "worse", "undecided", "equivalent, not faster", "equivalent and faster"
]


def examples_for(loss: float, rate: float) -> int:
    """Returns how many examples can rule a loss out, if none of them is lost.

    Example:
        >>> examples_for(0.005, 0.05)
        598
    """
    return math.ceil(math.log(rate) / math.log1p(-loss)) if loss < 1 else 1


def examples_needed(
    quality: Interval, tolerance: float, sampling: Sampling | None, rate: float
) -> tuple[int | None, str]:
    """Returns how many examples would decide where more seeds would not, and why."""
    if sampling is None:
        return None, ""
    needed = examples_for(tolerance, rate) if sampling.is_bounded else 0
    if sampling.number < needed:
        return needed, (
            f"inconclusive, since the tolerance is below what {sampling.number:,} "
            f"examples can show, of {needed:,} or more"
        )
    distance = abs(quality.estimate + tolerance)
    most_seeds = np.array([MAX_SEEDS])
    reach = max(sampling.reach(rate)) * float(sampling.shrinkage(most_seeds)[0])
    if reach < distance:
        return None, ""
    # Halving what they leave open takes four times as many.
    needed = math.ceil(sampling.number * (reach / max(distance, reach / 100)) ** 2) + 1
    return needed, (
        f"{sampling.number:,} examples leave {reach:.4g} open, however many seeds"
    )


def more_seeds(
    differences: Sequence[float],
    tolerance: float,
    sampling: Sampling | None = None,
    *,
    look: int = 2,
    num_candidates: int = 1,
) -> int | None:
    """Returns how many more seeds would decide, if mean and spread stay as they are.

    `look` is the number of the look that will have them. None where `MAX_SEEDS` would
    not be enough: the true loss is about the tolerance itself.
    """
    middle = float(np.mean(differences)) + tolerance
    # Worse is claimed with less error than equivalent.
    spent = rate_of if middle > 0 else difference_rate_of
    rate = spent(look, num_candidates)
    return _more(differences, abs(middle), rate, sampling)


def _more(
    values: Sequence[float] | np.ndarray,
    distance: float,
    rate: float,
    sampling: Sampling | None = None,
) -> int | None:
    """Returns how many more values bring half of the interval under a distance."""
    spread = float(np.std(values, ddof=1))
    numbers = np.arange(len(values) + 1, MAX_SEEDS + 1)
    halves = quantiles(rate, MAX_SEEDS)[numbers - 2] * spread / np.sqrt(numbers)
    if sampling is not None:
        halves = np.hypot(
            halves, max(sampling.reach(rate)) * sampling.shrinkage(numbers)
        )
    enough = np.flatnonzero(halves < distance)
    return int(enough[0]) + 1 if len(enough) else None


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
        num_examples: Examples that the metric was taken on, 0 where they were not
            counted in.
        examples_needed: How many of them would decide where more seeds would not help;
            None elsewhere.
        quality_effect: What the difference of the metric comes to, "" if unknown.
        speed_effect: What the ratio of examples/s comes to, likewise.
    """

    answer: Answer
    reason: str
    quality: Interval
    speed: Interval
    tolerance: float
    num_seeds: int
    more_seeds: int | None = None
    num_examples: int = 0
    examples_needed: int | None = None
    quality_effect: Effect = ""
    speed_effect: Effect = ""

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
    differences: Sequence[float],
    ratios: Sequence[float],
    *,
    tolerance: float,
    sampling: Sampling | None = None,
    resolution: float = 0.0,
    look: int = 1,
    num_candidates: int = 1,
) -> Verdict:
    """Returns the verdict on a policy against a reference.

    Worse means worse by more than `tolerance`; a policy that is better is equivalent.
    Not faster means that a gain of `MIN_GAIN` or more can be ruled out, however sure a
    smaller one is. Over all looks together each false claim has a chance of at most 5
    %, if differences and logarithms of ratios are about normal over seeds.

    Both sequences have a value for each of at least two seeds: `differences` of the
    metric, above 0 where the policy is better, `ratios` of its examples/s to the
    reference's. `sampling` is what the examples leave open, None counts the seeds
    alone; `resolution` the least difference that the metric can show; looks count from
    1.

    Example:
        >>> judge([0.001, -0.001, 0.0], [1.9, 2.0, 2.1], tolerance=0.005).answer
        'equivalent and faster'
        >>> judge([-0.02, -0.021, -0.019], [2.0, 2.0, 2.1], tolerance=0.005).answer
        'worse'
        >>> print(str(judge([0.01, -0.01], [2.0, 2.1], tolerance=0.005)).split(";")[0])
        undecided: needs 48 more seeds

    Source: Schuirmann, A comparison of the two one-sided tests procedure and the power
    approach for assessing the equivalence of average bioavailability, 1987.
    """
    rate = rate_of(look, num_candidates)
    quality = quality_of(differences, rate, sampling, resolution=resolution)
    sure_rate = difference_rate_of(look, num_candidates)
    sure = quality_of(differences, sure_rate, sampling, resolution=resolution)
    speed = interval_of_ratios(ratios, sure_rate)
    speed_effect = effect_of_ratio(speed, more_is_better=True)
    effect = quality_effect(quality, sure, tolerance)
    more = needed = None
    if effect == "worse":
        answer: Answer = "worse"
        reason = f"the metric loses {-quality.high:.3g} or more"
    elif effect == "unclear":
        answer = "undecided"
        reason = (
            f"the metric may lose {-quality.low:.3g} or change by {quality.high:+.3g}"
        )
        needed, why = examples_needed(quality, tolerance, sampling, rate)
        reason = f"{why}: {reason}" if why else reason
        if needed is None:
            more = more_seeds(
                *(differences, tolerance, sampling),
                look=look + 1,
                num_candidates=num_candidates,
            )
    else:
        lost = f"at most {-quality.low:.3g}" if quality.low < 0 else "nothing"
        reason = f"the metric loses {lost}"
        if speed.high < MIN_GAIN:
            answer = "equivalent, not faster"
        elif speed_effect == "better":
            answer = "equivalent and faster"
        else:
            answer = "undecided"
            reason = f"as accurate, but maybe faster and maybe not: {reason}"
            # From 1, to be faster; from the least gain, to be not.
            logarithms = np.log(np.asarray(ratios, np.float64))
            middle, least = float(np.mean(logarithms)), math.log(MIN_GAIN)
            distance = middle if middle >= least else least - middle
            next_rate = difference_rate_of(look + 1, num_candidates)
            more = _more(logarithms, distance, next_rate)
    estimate, low, high = (
        f"{value:#.3g}".rstrip(".") for value in dataclasses.astuple(speed)
    )
    reason += (
        f", where {tolerance:.3g} is allowed; {estimate} times ({low} to {high}) as "
        "many examples/s"
    )
    return Verdict(
        *(answer, reason, quality, speed, tolerance, len(ratios), more),
        num_examples=0 if sampling is None else sampling.number,
        examples_needed=needed,
        quality_effect=effect,
        speed_effect=speed_effect,
    )


def quality_effect(found: Interval, sure: Interval, tolerance: float) -> Effect:
    """Returns what a difference of the metric comes to; `sure` errs less often."""
    if sure.high < -tolerance:
        return "worse"
    if sure.low > tolerance:
        return "better"
    return "as good" if found.low >= -tolerance else "unclear"
