"""A batch of the data, all that a trial needs of it, and the seconds of its steps."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.stepping.arguments import arrays_of, dataset_of, first_batch
from tfamp.trials.run.inference import rows

# Steps are cheap beside the start of the process: short ones are repeated, since the
# median of three says little of a step of a millisecond.
_MIN_SECONDS = 0.5
_MAX_CALLS = 100
# What `fit` takes of arrays by default, and how many rows of them a trial gets.
_FIT_BATCH_SIZE = 32
_MAX_ROWS = 1024


class Times(NamedTuple):
    """Seconds of the first step, with tracing and compiling, and of each after it."""

    first_step_seconds: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)


def time_steps(
    model: keras.Model,
    parts: Any,
    *,
    size: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Trains by `fit` on batches of `size` rows, and times the steps after the first.

    Every step gets a batch of its own, made while the one before is trained, so that
    memory holds two of them as with a pipeline that prefetches. More than `steps` are
    timed while they are short.
    """
    calls = max(steps, _MAX_CALLS)
    steps_a_call = int(getattr(model, "steps_per_execution", 1) or 1)
    enlarged = functools.partial(rows, size=size)
    dataset = (
        tf.data.Dataset.range((calls + 1) * steps_a_call)
        .map(lambda _: tf.nest.map_structure(enlarged, parts))
        .prefetch(1)
    )
    timer = _Timer(steps, clock)
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    first, *rest = timer.seconds
    return Times(first, tuple(seconds / steps_a_call for seconds in rest))


class _Timer(keras.callbacks.Callback):
    """Times each call of the training function, and ends training when it is enough."""

    def __init__(self, steps: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._steps, self._clock = steps, clock
        self._began = clock()

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Starts the first step."""
        self._began = self._clock()

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Notes a step once its work is done."""
        _wait(self.model, logs)
        now = self._clock()
        self.seconds.append(now - self._began)
        self._began = now
        timed = self.seconds[1:]
        if len(timed) >= self._steps and sum(timed) >= _MIN_SECONDS:
            self.model.stop_training = True


def _wait(model: keras.Model, logs: Mapping[str, Any] | None) -> None:
    """Waits for the device by reading what the step returned, and its counter."""
    for value in list((logs or {}).values())[:1]:
        np.asarray(value)
    if model.optimizer is not None:
        np.asarray(model.optimizer.iterations)


class Batch(NamedTuple):
    """A batch as `fit` takes it, and what is known of the rest.

    `size` counts its examples, of arrays what `fit` takes by default; `num_examples`
    about those of the data, None where that is not known.
    """

    parts: Any
    size: int
    num_examples: int | None


def batch_of(data: Any) -> Batch:
    """Returns one batch of anything that `fit` takes."""
    arrays = arrays_of(data, needs_targets=False)
    if arrays is not None:
        return _of_arrays(arrays)
    dataset = dataset_of(data)
    batch = first_batch(dataset)
    first = tf.nest.flatten(batch)[0]
    size = int(first.shape[0] or tf.shape(first)[0])
    number = known_length(dataset)
    return Batch(batch, size, None if number is None else number * size)


def _of_arrays(data: tuple[Any, ...]) -> Batch:
    numbers = {len(array) for array in tf.nest.flatten(data)}
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError(
            f"The arrays of `data` have {tuple(sorted(numbers))!r} rows; expected the "
            "same number in all of them, and at least one. Pass (x, y), row by row."
        )
    (number,) = numbers
    parts = tf.nest.map_structure(
        lambda each: tf.convert_to_tensor(each[:_MAX_ROWS]), data
    )
    return Batch(parts, min(_FIT_BATCH_SIZE, number), number)
