"""`Throughput`: how fast a model trains, and how much of the time it waits for data."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tfamp.callbacks import _fit_callback as base
from tfamp.callbacks._fit_callback import FitCallback, Logs
from tfamp.keras_hooks import around_training, trainer

# Calls whose rates the bar shows.
_WINDOW = 50


class _Call(NamedTuple):
    """A call of the training function; examples are 0 where they are not counted."""

    batches: int
    seconds: float
    examples: int
    waited: float


class Throughput(FitCallback):
    """Shows how fast a model trains, while it does.

    `fit`'s progress bar and `History` get `examples_per_second` (of all replicas),
    `step_seconds` (the median step), `input_wait` (the part of the time that steps
    waited for their batch, in [0, 1]) and, in the first epoch, `first_step_seconds`.
    That holds tracing and compiling, and is left out of all else, as are validation,
    the first step on each shape of batch, and other callbacks at the ends of epochs.

    With `steps_per_execution` above 1, and on several workers, the steps draw their
    batches themselves, and there is no `input_wait`; `notes` says so.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((96, 1))
        >>> run = model.fit(data, data, verbose=0, callbacks=[Throughput()])
        >>> run.history["examples_per_second"][0] > 0
        True
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.first_step_seconds: float | None = None
        self._clock = clock
        self._is_measuring = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Takes its place around the training function."""
        place = around_training.Place.THROUGHPUT
        self._is_measuring = self._join(place=place, call=self._call)
        if not self._is_measuring:
            return
        self.first_step_seconds, self._is_first_epoch = None, True
        self._latest: dict[str, float] = {}
        self._steps = int(self.model.steps_per_execution or 1)
        self._draws = self._steps == 1 and base.can_draw(self.model)
        self._function: Any = None
        self._shapes: set[tuple[str, ...]] = set()
        self.on_epoch_begin(0)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins to measure an epoch."""
        self._calls: list[_Call] = []
        # When the last call ended; None: the time until the next is left out.
        self._ended: float | None = None
        self._left = (self.params or {}).get("steps")
        self._counted = 0.0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Puts the rates of the last window into the logs."""
        if logs is not None and not base.BAR_AVERAGES and self._is_measuring:
            logs.update(self._latest)

    def on_test_begin(self, logs: Logs = None) -> None:
        """Leaves the time of the validation inside `fit` out."""
        self._ended = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Puts the rates of the epoch into the logs."""
        if not self._is_measuring:
            return
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
        self._is_measuring = False

    def _call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands around the training function."""
        began = self._clock() if self._ended is None else self._ended
        self._is_new = function is not self._function
        if self._is_new:  # what is made anew is traced anew
            self._function = function
            self._shapes.clear()
        source, self._waited, self._examples = iterator, 0.0, 0
        if self._draws:
            source = base.Draws(lambda: self._draw(iterator), iterator)
        logs = function(source)
        self._ended = self._clock()
        batches = self._steps
        if self._left is not None:
            batches, self._left = min(batches, self._left), self._left - batches
        if not self._draws:
            # What the call has drawn by itself, as the loss has counted it.
            counted = trainer.examples_recorded(self.model) or 0.0
            self._examples = max(0, round(counted - self._counted))
            self._counted = counted
        seconds = self._ended - began
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        if not self._is_new and batches > 0:
            call = _Call(batches, seconds, self._examples, self._waited)
            self._calls.append(call)
            is_last = self._left is not None and self._left <= 0
            if is_last or len(self._calls) % _WINDOW == 0:
                self._latest = self._rates(self._calls[-_WINDOW:])
        return logs

    def _draw(self, iterator: Any) -> Any:
        """Returns the next batch, timed and counted."""
        start = self._clock()
        data = next(iterator)
        self._waited = self._clock() - start
        local = self.model.distribute_strategy.experimental_local_results
        self._examples = 0
        for leaf in tf.nest.flatten(data):  # of all replicas, by the first array
            parts = local(leaf)
            if all(getattr(getattr(part, "shape", None), "rank", 0) for part in parts):
                rows = (part.shape[0] or tf.shape(part)[0] for part in parts)
                self._examples = sum(map(int, rows))
                break
        # A batch of a new shape may be traced anew, so its step tells nothing.
        leaves = tf.nest.flatten(data, expand_composites=True)
        shape = tuple(str(getattr(leaf, "shape", "")) for leaf in leaves)
        self._is_new |= shape not in self._shapes
        self._shapes.add(shape)
        return data

    def _rates(self, calls: Sequence[_Call]) -> dict[str, float]:
        """Returns what calls come to, without what is not known."""
        seconds = sum(each.seconds for each in calls)
        if seconds <= 0:
            return {}
        rates = {}
        if all(each.examples for each in calls):
            rates["examples_per_second"] = (
                sum(each.examples for each in calls) / seconds
            )
        # Of a call only the mean is known, which stands for each of its steps.
        rates["step_seconds"] = statistics.median_low(
            each.seconds / each.batches for each in calls for _ in range(each.batches)
        )
        if self._draws:
            rates["input_wait"] = min(1.0, sum(each.waited for each in calls) / seconds)
        return rates
