"""Which batch sizes to try, and which of them to take."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfamp.memory.batch_search.records import StoppedBy, Trial
from tfamp.records.record import Record

# The answer lies within this part below the largest that fits.
_PRECISION = 1 / 8
MAX_BATCH_SIZE = 2**20


class Split(NamedTuple):
    """A way to make up one update: examples of a step on all replicas, and steps."""

    batch_size: int
    steps: int


def splits(largest: int, target: int, *, replicas: int = 1) -> tuple[Split, ...]:
    """Returns ways to make up updates of `target` examples, the best first.

    First comes the largest batch that goes into the target without a rest, a multiple
    of 8 if there is one in reach; smaller than half of `largest` it is too slow to be
    worth that. Then the batch that comes closest in as few steps as can be, and last
    the largest itself.
    """
    fewest = math.ceil(target / largest)
    exact = [
        Split(target // steps, steps)
        for steps in range(fewest, 2 * fewest + 1)
        if target % steps == 0 and (target // steps) % replicas == 0
    ]
    aligned = [split for split in exact if split.batch_size % 8 == 0]
    found = [*aligned[:1], *exact[:1]]
    nearest = max(1, round(target / fewest / replicas)) * replicas
    found += [Split(nearest, fewest), Split(largest, fewest)]
    return tuple(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class TrialFacts(Record):
    """What a trial tells of the model and its data, before it trains.

    A batch is a multiple of the `replicas` that share it; `num_examples` of the data
    are None where that is not known. `batch_size` is the one that is tried.
    """

    replicas: int = 1
    num_examples: int | None = None
    model: str = ""
    batch_size: int = 0
    data_batch_size: int | None = None


class Found(NamedTuple):
    """What a search came to.

    `chosen` is the trial to take, None where not even the least batch fits. All trials
    are in the order they were made. `largest_that_fits` is known where memory or time
    ended the growth.
    """

    chosen: Trial | None
    trials: tuple[Trial, ...]
    stopped_by: StoppedBy
    largest_that_fits: int | None


def possible_size(size: int, facts: TrialFacts) -> int:
    """Returns a batch size as the data and the replicas allow it."""
    if facts.num_examples is not None:
        size = min(size, facts.num_examples)
    return -(-size // facts.replicas) * facts.replicas


def search(
    try_size: Callable[[int], Trial],
    *,
    start: int,
    caps: Mapping[StoppedBy, int],
    min_gain: float | None,
    facts: Callable[[], TrialFacts] = TrialFacts,
) -> Found:
    """Searches for the least batch size that is about as fast as any that fits.

    The size doubles until it does not fit, or until that gains less than `min_gain` in
    examples/s, measured twice; None takes the largest that fits. Where memory ended the
    growth, the limit is narrowed down to multiples of 8. What is chosen was tried
    itself. `caps` has the most that a batch may be, by what says so; `facts` are asked
    after the first trial, which may change the size as data and replicas want.
    """
    tried = _Tried(try_size, min_gain)
    size = tried(start).batch_size
    known = facts()
    if known.num_examples is not None:
        caps = {**caps, "data": possible_size(known.num_examples, known)}
    stopped_by, good, bad = _grown(tried, size, caps, known.replicas)
    if good and bad:
        # Among small sizes every one counts.
        unit = known.replicas if good < 8 else math.lcm(8, known.replicas)
        good = _narrowed(lambda each: tried(each).fits, good, bad, multiple=unit)
    return Found(
        chosen=choice(tried.trials, min_gain),
        trials=tried.trials,
        stopped_by=stopped_by,
        largest_that_fits=good if good and bad else None,
    )


def choice(trials: tuple[Trial, ...], min_gain: float | None) -> Trial | None:
    """Returns the least of the trials that fit and are about as fast as the fastest.

    Where `min_gain` is None, the largest that fits.
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
    speeds = first.examples_per_second or 0.0, second.examples_per_second or 0.0
    speed = sum(speeds) / 2
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

    def __init__(
        self, try_size: Callable[[int], Trial], min_gain: float | None
    ) -> None:
        self._try_size, self._min_gain = try_size, min_gain
        self._by_size: dict[int, Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._by_size.values())

    def __call__(self, size: int) -> Trial:
        if size not in self._by_size:
            trial = self._try_size(size)
            size = trial.batch_size
            self._by_size[size] = trial
        return self._by_size[size]

    def again(self, size: int) -> Trial:
        """Tries a size once more."""
        self._by_size[size] = merged(self._by_size[size], self._try_size(size))
        return self._by_size[size]

    def is_knee(self, size: int, larger: int) -> bool:
        """States whether a doubled size gains too little speed."""
        if self._min_gain is None or larger < 2 * size:
            return False
        before = self._by_size[size].examples_per_second or 0.0
        after = self._by_size[larger].examples_per_second or 0.0
        return after / before - 1 < self._min_gain if before else False


def _grown(
    tried: _Tried, size: int, caps: Mapping[StoppedBy, int], replicas: int
) -> tuple[StoppedBy, int, int]:
    """Doubles a size, or halves it until one fits.

    Returns what ended it, the largest that fits and the least that does not, or 0.
    """
    if not tried(size).fits:
        return _shrunk(tried, size, replicas)
    reason, cap = min(caps.items(), key=lambda item: item[1])
    while True:
        larger = _next_size(size, cap, reason, replicas)
        if larger <= size:
            return reason, size, 0
        trial = tried(larger)
        if trial.fits and tried.is_knee(size, larger):
            # One slow process must not end the search.
            trial = tried.again(larger)
        if not trial.fits:
            return _ended_by(trial), size, larger
        if larger < 2 * size:
            return reason, larger, 0
        if tried.is_knee(size, larger):
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


def _narrowed(
    fits: Callable[[int], bool], good: int, bad: int, *, multiple: int = 1
) -> int:
    """Returns about the largest size that fits, between one that does and one not."""
    while bad - good > max(multiple, _PRECISION * good):
        middle = (good + bad) // 2
        # Tensor cores and vector units like multiples of 8.
        for unit in (math.lcm(8, multiple), multiple):
            rounded = middle - middle % unit
            if rounded > good:
                break
        else:
            return good
        if fits(rounded):
            good = rounded
        else:
            bad = rounded
    return good
