"""What an undecided comparison lacks: more seeds, or more validation examples."""

import math
from collections.abc import Sequence

import numpy as np

from tfamp.comparison.evidence.resampling import Sampling, examples_for, least_loss
from tfamp.trials.intervals import (
    MIN_GAIN,
    Interval,
    difference_rate_of,
    quantiles,
    rate_of,
)

# Beyond so many seeds more of them is no advice.
MAX_SEEDS = 1000


def examples_needed(
    quality: Interval, tolerance: float, sampling: Sampling | None, rate: float
) -> tuple[int | None, str]:
    """Returns how many examples would decide where more seeds would not, and why."""
    if sampling is None:
        return None, ""
    if sampling.is_bounded and tolerance < least_loss(sampling.number, rate):
        needed = examples_for(tolerance, rate)
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
    *,
    tolerance: float,
    sampling: Sampling | None = None,
    look: int = 2,
    num_candidates: int = 1,
) -> int | None:
    """Returns how many more seeds would decide, if mean and spread stay as they are.

    Args:
        differences: As for `judge`.
        tolerance: Likewise.
        sampling: Likewise.
        look: Number of the look that will have them.
        num_candidates: As for `judge`.

    Returns:
        None where `MAX_SEEDS` would not be enough: the true loss is about the
        tolerance itself.
    """
    middle = float(np.mean(differences)) + tolerance
    # Worse is claimed with less error than equivalent.
    spent = rate_of if middle > 0 else difference_rate_of
    rate = spent(look, num_candidates)
    return _more(differences, abs(middle), rate, sampling)


def more_seeds_for_speed(
    ratios: Sequence[float], *, look: int = 2, num_candidates: int = 1
) -> int | None:
    """Returns how many more seeds would tell faster from not faster, likewise."""
    rate = difference_rate_of(look, num_candidates)
    logarithms = np.log(np.asarray(ratios, np.float64))
    middle, least = float(np.mean(logarithms)), math.log(MIN_GAIN)
    # From 1, to be faster; from the least gain, to be not.
    return _more(logarithms, middle if middle >= least else least - middle, rate)


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
