"""Draws batches from a dataset for as long as one likes, epoch starts apart."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfamp.stepping.input_waits.turns import Excluded

# Batches that stand for all others when the model is timed alone, so that varying
# shapes are represented.
_MAX_KEPT = 8
_MAX_KEPT_BYTES = 256 * 2**20
# With fewer calls in an epoch its start is a part of every step.
_MIN_CALLS_OF_EPOCH = 4


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset, prepared to be drawn from.

    Attributes:
        dataset: What to iterate, once for each epoch or for ever.
        calls_per_epoch: Calls that find full batches in one iteration; None where
            the dataset goes on for ever, its epochs' starts within it.
        repeats: Whether epochs were joined because they are short or their length
            is not known.
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

    Args:
        make_iterator: Starts an epoch.
        calls_per_epoch: Calls until a new one is started; None for no end.
        clock: Gives seconds.
        wait: Waits for the device.

    Attributes:
        excluded: Time and calls of epoch starts.
        starts: Seconds of each: the iterator and the first call.
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
