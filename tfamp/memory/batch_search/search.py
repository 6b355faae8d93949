"""Which batch sizes to try, and which of them to take."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfamp.memory.batch_search.records import StoppedBy, Trial
from tfamp.trials.tasks import Facts

# The answer lies within this part below the largest that fits.
_PRECISION = 1 / 8
MAX_BATCH_SIZE = 2**20
# One slow process must not end the growth.
_MAX_FLAT = 2


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
    examples/s twice in a row; None takes the largest that fits. Where memory ended the
    growth, the limit is narrowed down to multiples of 8. What is chosen was tried
    itself. `caps` has the most that a batch may be, by what says so; `facts` are asked
    after the first trial, which may change the size as data and replicas want. At least
    two batches have to make up the data.
    """
    trials: dict[int, Trial] = {}

    def trial_of(size: int) -> Trial:
        if size not in trials:
            trial = try_size(size)
            trials[trial.batch_size] = trial
            return trial
        return trials[size]

    first = trial_of(start)
    size, known = first.batch_size, facts()
    if known.num_examples is not None:
        caps = {**caps, "data": known.possible(max(known.num_examples // 2, 1))}
    replicas, good, bad = known.replicas, 0, 0
    stopped_by, cap = min(caps.items(), key=lambda item: item[1])
    if first.fits:
        good, flat = size, 0
        while (larger := _next_size(good, cap, stopped_by, replicas)) > good:
            trial = trial_of(larger)
            if not trial.fits:
                stopped_by, bad = _ended_by(trial), larger
                break
            before, after = (trials[s].examples_per_second or 0 for s in (good, larger))
            is_last = larger < 2 * good  # what was left up to the cap
            is_flat = min_gain is not None and after < before * (1 + min_gain)
            flat = flat + 1 if is_flat and not is_last else 0
            good = larger
            if flat == _MAX_FLAT:
                stopped_by = "knee"
            if is_last or flat == _MAX_FLAT:
                break
    else:
        stopped_by, bad = _ended_by(first), size
        # Of a model that is not even built no other size is worth a trial.
        while not good and trials[bad].began_training:
            smaller = bad // 2 // replicas * replicas
            if smaller < 1:
                break
            good, bad = (smaller, bad) if trial_of(smaller).fits else (0, smaller)
    if good and bad:
        # Among small sizes every one counts.
        unit = replicas if good < 8 else math.lcm(8, replicas)
        good = _narrowed(lambda each: trial_of(each).fits, good, bad, multiple=unit)
    made = tuple(trials.values())
    return Found(
        choice(made, min_gain), made, stopped_by, good if bad and good else None
    )


def choice(trials: tuple[Trial, ...], min_gain: float | None) -> Trial | None:
    """Returns the least of the trials that fit and are about as fast as the fastest.

    Where `min_gain` is None, the largest that fits.
    """
    fitting = sorted((t for t in trials if t.fits), key=lambda trial: trial.batch_size)
    if min_gain is None or not fitting:
        return fitting[-1] if fitting else None
    least = (1 - min_gain) * max(t.examples_per_second or 0.0 for t in fitting)
    return next(t for t in fitting if (t.examples_per_second or 0.0) >= least)


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
