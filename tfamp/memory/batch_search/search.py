"""Which batch sizes to try, and which of them to take."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfamp.memory.batch_search.records import StoppedBy, Trial
from tfamp.trials.largest_batch import narrowed


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the first trial tells of the model and its data.

    Attributes:
        replicas: Devices that share a batch, which is a multiple of them.
        num_examples: Examples of the data, None where that is not known.
    """

    replicas: int = 1
    num_examples: int | None = None


class Found(NamedTuple):
    """What a search came to.

    Attributes:
        chosen: The trial to take; None where not even the least batch fits.
        trials: All, in the order they were made.
        stopped_by: What ended the growth.
        largest_that_fits: Where memory or time ended it.
    """

    chosen: Trial | None
    trials: tuple[Trial, ...]
    stopped_by: StoppedBy
    largest_that_fits: int | None


def possible_size(size: int, facts: Facts) -> int:
    """Returns a batch size as the data and the replicas allow it.

    Example:
        >>> possible_size(8, Facts(replicas=3)), possible_size(64, Facts(1, 40))
        (9, 40)
    """
    if facts.num_examples is not None:
        size = min(size, facts.num_examples)
    return -(-size // facts.replicas) * facts.replicas


def search(
    try_size: Callable[[int], Trial],
    *,
    start: int,
    caps: Mapping[StoppedBy, int],
    min_gain: float | None,
    facts: Callable[[], Facts] = Facts,
) -> Found:
    """Searches for the least batch size that is about as fast as any that fits.

    The size doubles until it does not fit, or until that gains less than `min_gain` in
    examples/s, measured twice. Where memory ended the growth, the limit is narrowed
    down to multiples of 8. What is chosen was tried itself.

    Args:
        try_size: Tries a size. The first one it may change as the data and the
            replicas want.
        start: The first size.
        caps: The most that a batch may be, by what says so.
        min_gain: Part by which a doubled batch has to be faster; None for the largest
            that fits, however fast.
        facts: Gives what the first trial found; asked after it.

    Example:
        >>> def half_full(size):
        ...     outcome = "fits" if size <= 100 else "killed"
        ...     return Trial(size, outcome, examples_per_second=10.0 * size)
        >>> found = search(half_full, start=8, caps={"max_batch_size": 999},
        ...                min_gain=0.05)
        >>> found.chosen.batch_size, found.stopped_by
        (96, 'memory')
    """
    tried = _Tried(try_size)
    size = tried(start).batch_size
    known = facts()
    if known.num_examples is not None:
        caps = {**caps, "data": possible_size(known.num_examples, known)}
    stopped_by, good, bad = _grown(tried, size, caps, min_gain, known.replicas)
    if good and bad:
        # Among small sizes every one counts.
        unit = known.replicas if good < 8 else math.lcm(8, known.replicas)
        good = narrowed(lambda each: tried(each).fits, good, bad, multiple=unit)
    return Found(
        chosen=choice(tried.trials, min_gain),
        trials=tried.trials,
        stopped_by=stopped_by,
        largest_that_fits=good if good and bad else None,
    )


def choice(trials: tuple[Trial, ...], min_gain: float | None) -> Trial | None:
    """Returns the least of the trials that fit and are about as fast as the fastest.

    Args:
        trials: All of them.
        min_gain: What "about" means; None for the largest that fits.
    """
    if min_gain is None:
        fitting = [trial for trial in trials if trial.fits]
        return max(fitting, key=lambda trial: trial.batch_size, default=None)
    speeds = [(t.examples_per_second or 0.0, t) for t in trials if t.fits]
    best = max((speed for speed, _ in speeds), default=0.0)
    near = [trial for speed, trial in speeds if speed >= (1 - min_gain) * best]
    return min(near, key=lambda trial: trial.batch_size, default=None)


def merged(first: Trial, second: Trial) -> Trial:
    """Returns two trials of a size as one: it fits if both do, at their mean speed."""
    num_runs = first.num_runs + second.num_runs
    if not second.fits:
        return dataclasses.replace(second, num_runs=num_runs)
    speed = statistics.median(
        [first.examples_per_second or 0.0, second.examples_per_second or 0.0]
    )
    peaks = [p for p in (first.peak_bytes, second.peak_bytes) if p is not None]
    return dataclasses.replace(
        first,
        examples_per_second=speed,
        step_seconds=first.batch_size / speed if speed else None,
        peak_bytes=max(peaks, default=None),
        num_runs=num_runs,
    )


class _Tried:
    """The trials so far, one for each size."""

    def __init__(self, try_size: Callable[[int], Trial]) -> None:
        self._try_size = try_size
        self._by_size: dict[int, Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._by_size.values())

    def __call__(self, size: int) -> Trial:
        if size not in self._by_size:
            trial = self._try_size(size)
            self._by_size[trial.batch_size] = trial
            size = trial.batch_size
        return self._by_size[size]

    def again(self, size: int) -> Trial:
        """Tries a size once more."""
        self._by_size[size] = merged(self._by_size[size], self._try_size(size))
        return self._by_size[size]

    def gain(self, size: int, larger: int) -> float:
        """Returns by which part the larger of two sizes is faster."""
        before = self._by_size[size].examples_per_second or 0.0
        after = self._by_size[larger].examples_per_second or 0.0
        return after / before - 1 if before else 1.0


def _grown(
    tried: _Tried,
    size: int,
    caps: Mapping[StoppedBy, int],
    min_gain: float | None,
    replicas: int,
) -> tuple[StoppedBy, int, int]:
    """Doubles a size, or halves it until one fits.

    Returns:
        What ended it, the largest that fits and the least that does not, or 0.
    """
    if not tried(size).fits:
        return _shrunk(tried, size, replicas)
    reason, cap = min(caps.items(), key=lambda item: item[1])
    while True:
        larger = _next_size(size, cap, reason, replicas)
        if larger <= size:
            return reason, size, 0
        trial = tried(larger)
        is_doubled = larger >= 2 * size
        least_gain = -math.inf if min_gain is None or not is_doubled else min_gain
        if trial.fits and tried.gain(size, larger) < least_gain:
            # One slow process must not end the search.
            trial = tried.again(larger)
        if not trial.fits:
            return _ended_by(trial), size, larger
        if not is_doubled:
            return reason, larger, 0
        if tried.gain(size, larger) < least_gain:
            return "knee", size, 0
        size = larger


def _shrunk(tried: _Tried, size: int, replicas: int) -> tuple[StoppedBy, int, int]:
    while True:
        smaller = size // 2 // replicas * replicas
        reason = _ended_by(tried(size))
        if smaller < 1 or not tried(size).began_training:
            return reason, 0, size
        if tried(smaller).fits:
            return reason, smaller, size
        size = smaller


def _next_size(size: int, cap: int, reason: StoppedBy, replicas: int) -> int:
    """Returns twice the size, or what is left up to the cap."""
    if 2 * size <= cap:
        return 2 * size
    # An update of exactly the target is worth more than a multiple of 8.
    unit = replicas if reason == "target_batch_size" or cap - size < 8 else 8
    rounded = cap - cap % unit
    return rounded if rounded % replicas == 0 else cap - cap % replicas


def _ended_by(trial: Trial) -> StoppedBy:
    return "time" if trial.outcome == "too slow" else "memory"
