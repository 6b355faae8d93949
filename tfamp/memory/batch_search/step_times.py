"""Times a few real training steps of one batch size."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.trials.run.inference import rows

# Steps are cheap beside the start of the process: short ones are repeated, since the
# median of three says little of a step of a millisecond.
_MIN_SECONDS = 0.5
_MAX_CALLS = 100


class Times(NamedTuple):
    """What the steps took.

    Attributes:
        first_step_seconds: With tracing and compiling.
        seconds: Of each step after that.
    """

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
    memory holds two of them as with a pipeline that prefetches.

    Args:
        model: Compiled.
        parts: A batch of the data, whose rows are repeated to the size.
        size: Examples of a step, on all replicas.
        steps: The least number of steps to time; more are taken while they are short.
        clock: Gives the time in seconds.
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
