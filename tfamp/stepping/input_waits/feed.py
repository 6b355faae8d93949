"""Turns that are timed, and batches for as long as one likes, epoch starts apart."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfamp.records.console import progress

# Many short turns rather than few long ones: what disturbs a machine for half a second
# then spoils a few rounds of all. Below five rounds a noise band means little.
_MIN_ROUNDS, MAX_ROUNDS = 5, 40
# The first round finds caches cold and buffers empty.
_NUM_WARM_ROUNDS = 1
# Of a turn, what is not counted.
_WARM_SHARE = 0.4
# A device works on while Python goes on; it is waited for once in so many calls,
# unless calls are long.
_CALLS_TO_WAIT = 8
_LONG_SECONDS = 0.002
# Calls of a turn, however long they take. Before, what the last turn left is used
# up: batches that were fetched ahead while something else ran.
_MIN_CALLS = 4
_MIN_WARM_CALLS = 3
# Batches that stand for all others when the model is timed alone, so that varying
# shapes are represented.
_MAX_KEPT = 8
_MAX_KEPT_BYTES = 256 * 2**20
# With fewer calls in an epoch its start is a part of every step.
_MIN_CALLS_OF_EPOCH = 4


@dataclasses.dataclass
class Excluded:
    """Time and calls that belong to no step, such as the start of an epoch."""

    seconds: float = 0.0
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """One thing to time.

    `call` does it once, `wait` waits until the device has done it, and `excluded` is
    what `call` adds to when it does something else as well.
    """

    call: Callable[[], None]
    wait: Callable[[], None] = lambda: None
    excluded: Excluded = dataclasses.field(default_factory=Excluded)

    def seconds_per_call(
        self,
        clock: Callable[[], float],
        *,
        warm_seconds: float,
        timed_seconds: float,
    ) -> float | None:
        """Returns the mean time of a call after some that do not count, None of none.

        The mean rather than the median: batches that come in bursts, as from parallel
        calls, have two typical times, and none of them is the rate.
        """
        self._run(clock, warm_seconds, _MIN_WARM_CALLS)
        seconds, calls = self._run(clock, timed_seconds, _MIN_CALLS)
        return seconds / calls if calls else None

    def _run(
        self, clock: Callable[[], float], seconds: float, min_calls: int
    ) -> tuple[float, int]:
        """Calls for a while; returns the seconds and the calls that count."""
        before = dataclasses.replace(self.excluded)
        start, calls, burst = clock(), 0, 1
        while calls < min_calls or clock() - start < seconds:
            for _ in range(burst):
                self.call()
            self.wait()
            calls += burst
            mean = (clock() - start) / calls
            burst = 1 if mean > _LONG_SECONDS else _CALLS_TO_WAIT
        left_out = self.excluded.seconds - before.seconds
        counted = calls - (self.excluded.calls - before.calls)
        return clock() - start - left_out, counted


def time_in_rounds(
    turns: Mapping[str, Turn],
    *,
    seconds: float,
    clock: Callable[[], float],
    max_rounds: int = MAX_ROUNDS,
    label: str = "Timing the input",
) -> dict[str, list[float]]:
    """Returns seconds a call of each turn, one figure a round, the first left out.

    When about `seconds` are used up no further round begins, unless there are too few;
    turns are as long as makes `max_rounds` of them. `label` is for the progress bar.
    """
    rounds = max_rounds + _NUM_WARM_ROUNDS
    length = seconds / (len(turns) * rounds)
    times: dict[str, list[float]] = {name: [] for name in turns}
    start = clock()
    with progress(label, rounds, unit="rounds") as done:
        for number in range(rounds):
            # A round that would end far beyond the budget is not begun.
            is_enough = number >= _MIN_ROUNDS + _NUM_WARM_ROUNDS
            if is_enough and (clock() - start) * (1 + 0.5 / number) > seconds:
                break
            measured = {
                name: turn.seconds_per_call(
                    clock,
                    warm_seconds=length * _WARM_SHARE,
                    timed_seconds=length * (1 - _WARM_SHARE),
                )
                for name, turn in turns.items()
            }
            done(number + 1)
            for name, value in measured.items():
                if value is not None and None not in measured.values():
                    times[name].append(value)
    return {name: values[_NUM_WARM_ROUNDS:] or values for name, values in times.items()}


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset to iterate, once for each epoch or for ever.

    `calls_per_epoch` find full batches in one iteration; None where the dataset goes on
    for ever, its epochs' starts within it. It `repeats` where epochs were joined, as
    they are short or of unknown length.
    """

    dataset: tf.data.Dataset
    calls_per_epoch: int | None
    repeats: bool


def prepare(dataset: tf.data.Dataset, steps_per_call: int) -> Source:
    """Returns a dataset without its smaller last batch, and how to iterate it.

    Nothing is cut off inside a pass, since a cache counts only when it was read to
    its end: what is left of an epoch is read, without being timed.
    """
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        return Source(dataset, None, False)
    if cardinality > 0:
        full = cardinality - 1 if _may_be_smaller(dataset.element_spec) else cardinality
        calls = full // steps_per_call
        if calls >= _MIN_CALLS_OF_EPOCH:
            return Source(dataset, calls, False)
    return Source(_full_batches(dataset).repeat(), None, True)


def kept_batches(
    source: Source, steps_per_call: int, *, batch_bytes: int
) -> tf.data.Dataset:
    """Returns a few batches of a source, from memory, for ever.

    They are read here, and their iterator is gone when this returns: a file cache
    inside has one writer at a time.
    """
    number = max(1, min(_MAX_KEPT, _MAX_KEPT_BYTES // max(1, batch_bytes)))
    if source.calls_per_epoch is not None:
        number = min(number, source.calls_per_epoch * steps_per_call)
    kept = source.dataset.take(number).cache()
    exhaust(kept)
    return kept.repeat()


class Feed:
    """Calls functions with an iterator that has batches left.

    A new one is made after `calls_per_epoch`, None for never. Time and calls of these
    starts of epochs are `excluded`; `starts` has the seconds of each with its first
    call.
    """

    def __init__(
        self,
        make_iterator: Callable[[], Any],
        calls_per_epoch: int | None,
        *,
        clock: Callable[[], float],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_iterator = make_iterator
        self._calls_per_epoch = calls_per_epoch
        self._clock = clock
        self._wait = wait
        self._iterator: Any = None
        self._left: int | None = 0
        self.excluded = Excluded()
        self.starts: list[float] = []

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Returns what `function` gives, called with an iterator."""
        if self._left == 0:
            self._wait()  # what the device still does belongs to the steps before
            start = self._clock()
            self._finish()
            begun = self._clock()
            self._iterator = self._make_iterator()
            self._left = self._calls_per_epoch
            result = self._once(function)
            self._wait()
            end = self._clock()
            self.starts.append(end - begun)
            self.excluded.seconds += end - start
            self.excluded.calls += 1
            return result
        return self._once(function)

    def close(self) -> None:
        """Lets the iterator go, with its threads and buffers."""
        self._iterator = None
        self._left = 0

    def _once(self, function: Callable[[Any], Any]) -> Any:
        if self._left is not None:
            self._left -= 1
        return function(self._iterator)

    def _finish(self) -> None:
        """Reads what is left of an epoch, so that a cache is complete."""
        if self._iterator is not None:
            exhaust(self._iterator)
        self._iterator = None


def exhaust(iterator: Iterable[Any]) -> int:
    """Reads an iterator to its end and returns how much was left."""
    return sum(1 for _ in iterator)


def _may_be_smaller(element_spec: Any) -> bool:
    """Whether the last batch may have fewer examples: their number is not static."""
    return any(
        spec.shape.rank is None or (spec.shape.rank > 0 and spec.shape[0] is None)
        for spec in tf.nest.flatten(element_spec)
        if isinstance(spec, tf.TensorSpec)
    )


def _full_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without batches smaller than its first, if only that varies.

    Where other axes vary too, as with buckets, the size of a batch may belong to
    its length, and every batch stays.
    """
    fixed = all(
        isinstance(spec, tf.TensorSpec)
        and spec.shape.rank
        and spec.shape[1:].is_fully_defined()
        for spec in tf.nest.flatten(dataset.element_spec)
    )
    if not (fixed and _may_be_smaller(dataset.element_spec)):
        return dataset
    first = next(iter(dataset.take(1)))
    size = tf.shape(tf.nest.flatten(first)[0])[0]
    return dataset.filter(
        lambda *parts: tf.equal(tf.shape(tf.nest.flatten(parts)[0])[0], size)
    )
