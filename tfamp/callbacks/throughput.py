"""`Throughput`: how fast a model trains, and how much of the time it waits for data."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import (
    BAR_AVERAGES,
    Draws,
    EventWriter,
    FitCallback,
    can_draw,
    check_path,
)
from tfamp.keras_hooks import around_training, trainer

# Batches in a window; the end of an epoch ends one too.
_EVERY = 50
_KEYS = ("examples_per_second", "step_seconds", "input_wait")


class _Call(NamedTuple):
    """A call of the training function; examples are 0 where they are not counted."""

    batches: int
    seconds: float
    examples: int
    waited: float


class Throughput(FitCallback):
    """Shows how fast a model trains, while it does.

    `fit`'s progress bar and `History` get `examples_per_second` (of all replicas, a
    short last batch as what it is), `step_seconds` (the median step), `input_wait` (the
    part of the time that steps waited for their batch, in [0, 1]) and, in the first
    epoch, `first_step_seconds`. That holds tracing and compiling, and is left out of
    all else, as are validation, the first step on each shape of batch, and other
    callbacks at the ends of epochs.

    A value that cannot be had is absent, and one line says why: with
    `steps_per_execution` above 1, and on several workers, the steps draw their batches
    themselves, and there is no `input_wait`. Keras 3.10 shows means over an epoch in
    its bar, so there they come at its end only.

    Args:
        log_dir: Folder for TensorBoard scalars of every 50 batches, made if need be.
        clock: Gives seconds.

    Attributes:
        first_step_seconds: Of the last `fit`, None before.
        notes: What cannot be told and why, a line each.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((96, 1))
        >>> run = model.fit(data, data, verbose=0, callbacks=[Throughput()])
        >>> run.history["examples_per_second"][0] > 0
        True
    """

    def __init__(
        self,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.first_step_seconds: float | None = None
        self._clock = clock
        self._events: EventWriter | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files and takes its place around the training function."""
        if not self._join(place=around_training.Place.THROUGHPUT, call=self._call):
            self._note(
                "No rates, since another Throughput measures the same `fit`: use one."
            )
            return
        self._events = EventWriter(self.model, ("step", *_KEYS), log_dir=self.log_dir)
        self.first_step_seconds, self._is_first_epoch = None, True
        self._latest: dict[str, float] = {}
        self._steps = int(self.model.steps_per_execution or 1)
        self._draws = self._steps == 1 and can_draw(self.model)
        self._function: Any = None
        self._shapes: set[tuple[str, ...]] = set()
        self._num_batches = 0
        self.on_epoch_begin(0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to measure an epoch."""
        # Calls of the epoch, and how many of them have a row already.
        self._calls: list[_Call] = []
        self._num_written = 0
        # When the last call ended; None: the time until the next is left out.
        self._ended: float | None = None
        self._left = (self.params or {}).get("steps")
        self._counted = 0.0

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Puts the rates of the last window into the logs."""
        if logs is not None and not BAR_AVERAGES and self._events is not None:
            logs.update(self._latest)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the window before the validation inside `fit`."""
        if self._events is not None:
            self._end_window()
            self._ended = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rates of the epoch into the logs."""
        if self._events is None:
            return
        self._end_window()
        if not all(each.examples for each in self._calls):
            self._note("No examples_per_second: a batch's examples cannot be counted.")
        if not self._draws:
            told = "No input_wait: the steps draw batches themselves; ask `bottleneck`."
            self._note(told, logging.INFO)
        if logs is not None:
            logs.update(self._rates(self._calls))
            if self._is_first_epoch and self.first_step_seconds is not None:
                logs["first_step_seconds"] = self.first_step_seconds
        self._is_first_epoch = False

    def _close(self, error: BaseException | None) -> None:
        if self._events is not None:
            self._events.close()
        self._events = None

    def _call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands around the training function, once its files are open."""
        if self._events is None:
            return function(iterator)
        began = self._clock() if self._ended is None else self._ended
        self._is_new = function is not self._function
        if self._is_new:  # what is made anew is traced anew
            self._function = function
            self._shapes.clear()
        source, self._waited, self._examples = iterator, 0.0, 0
        if self._draws:
            source = Draws(lambda: self._draw(iterator), iterator)
        logs = function(source)
        self._ended = self._clock()
        batches = self._steps
        if self._left is not None:
            batches, self._left = min(batches, self._left), self._left - batches
        if not self._draws:
            # What the call has drawn by itself, as the loss has counted it.
            counted = trainer.examples_recorded(self.model)
            self._examples = max(0, round(counted - self._counted))
            self._counted = counted
        self._num_batches += batches
        seconds = self._ended - began
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        if not self._is_new and batches > 0:
            call = _Call(batches, seconds, self._examples, self._waited)
            self._calls.append(call)
        is_full = (len(self._calls) - self._num_written) * batches >= _EVERY
        if is_full or (self._left is not None and self._left <= 0):
            self._end_window()
        return logs

    def _draw(self, iterator: Any) -> Any:
        """Returns the next batch, timed and counted."""
        start = self._clock()
        data = next(iterator)
        self._waited = self._clock() - start
        self._examples = _num_rows(self.model, data)
        # A batch of a new shape may be traced anew, so its step tells nothing.
        leaves = tf.nest.flatten(data, expand_composites=True)
        shape = tuple(str(getattr(leaf, "shape", "")) for leaf in leaves)
        self._is_new |= shape not in self._shapes
        self._shapes.add(shape)
        return data

    def _end_window(self) -> None:
        """Writes a row of the calls that have none yet."""
        calls = self._calls[self._num_written :]
        self._num_written = len(self._calls)
        if calls and self._events is not None:
            self._latest = self._rates(calls)
            row = (self._num_batches, *map(self._latest.get, _KEYS))
            self._events.write([row])

    def _rates(self, calls: Sequence[_Call]) -> dict[str, float]:
        """Returns what calls come to, without what is not known."""
        seconds = sum(each.seconds for each in calls)
        if seconds <= 0:
            return {}
        rates = {}
        if all(each.examples for each in calls):
            rates[_KEYS[0]] = sum(each.examples for each in calls) / seconds
        # Of a call only the mean is known, which stands for each of its steps.
        rates[_KEYS[1]] = statistics.median_low(
            each.seconds / each.batches for each in calls for _ in range(each.batches)
        )
        if self._draws:
            rates[_KEYS[2]] = min(1.0, sum(each.waited for each in calls) / seconds)
        return rates


def _num_rows(model: keras.Model, data: Any) -> int:
    """Returns the number of examples in a batch of all replicas; 0 where unknown.

    That of the first part with more than a number in it, in the order of `tf.nest`: of
    the inputs, where the batch is `(x, y, sample_weight)`.
    """
    local = model.distribute_strategy.experimental_local_results
    for leaf in tf.nest.flatten(data):
        parts = local(leaf)
        if all(getattr(getattr(part, "shape", None), "rank", 0) for part in parts):
            return sum(int(part.shape[0] or tf.shape(part)[0]) for part in parts)
    return 0
