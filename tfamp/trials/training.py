"""Trains a model by `fit`, times its steps, and times calls of it afterwards."""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.machine.nvml import Nvml
from tfamp.records.checks import first_line
from tfamp.stepping.arguments import dataset_of, first_batch
from tfamp.trials.batches import rows
from tfamp.trials.run_records import Latency, Run

# Steps are timed in windows: of a shorter one a clock and a read of the loss, which
# waits for the device, would be a part.
WINDOW_SECONDS = 0.1
_WARMUP_PART, _MAX_WARMUP_STEPS, _MIN_EPOCHS = 0.1, 50, 3
# Of windows, at either end.
_TRIMMED_PART = 0.125
# More points than this a curve does not show.
_MAX_POINTS = 400
# Of a few steps that are short, so many seconds; and the most calls of them.
_ENOUGH_SECONDS, _MAX_STEP_CALLS = 0.5, 100
# Of calls of a trained model, for each batch size.
_WARMUP_CALLS, _MIN_CALLS, _MAX_CALLS, _SECONDS = 3, 10, 1000, 1.0


class Window(NamedTuple):
    """Some training steps of an epoch that were timed together, counted from 1."""

    epoch: int
    last_step: int
    steps: int
    seconds: float
    loss: float | None  # as `fit` logs it, the mean since the epoch began


class Clock(keras.callbacks.Callback):
    """Times windows of steps, with validation and the ends of epochs left out.

    `on_window` is called after each; it may end the training.
    """

    def __init__(
        self, steps_an_epoch: int | None, on_window: Callable[["Clock"], None]
    ) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.done = 0
        self._steps_an_epoch, self._on_window = steps_an_epoch, on_window
        self._logs: Mapping[str, Any] = {}
        self._epoch = self._seen = self._first = 0
        self._opened = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Opens the first window of the epoch."""
        self._epoch, self._seen, self._first = epoch, 0, self.done
        self._opened = time.perf_counter()

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Closes the window if it is long enough; the first holds the first step."""
        self._logs = logs or {}
        # Of a call of several steps; the last one of an epoch may have fewer.
        seen = self._seen + int(self.model.steps_per_execution or 1)
        seen = min(seen, self._steps_an_epoch or seen)
        self.done, self._seen = self.done + seen - self._seen, seen
        now = time.perf_counter()
        if not self.windows or now - self._opened >= WINDOW_SECONDS:
            self._close()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window: what follows is no training."""
        self._close()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window that is open where there was no validation."""
        self._close()

    def _close(self) -> None:
        if self.done == self._first:
            return
        loss = None  # reading it, or the counter, waits for the device
        if "loss" in self._logs:
            loss = float(np.asarray(self._logs["loss"]))
        elif self.model.optimizer is not None:
            np.asarray(self.model.optimizer.iterations)
        seconds, steps = time.perf_counter() - self._opened, self.done - self._first
        self.windows.append(Window(self._epoch, self.done, steps, seconds, loss))
        self._on_window(self)
        self._first, self._opened = self.done, time.perf_counter()


def seconds_per_step(windows: Sequence[Window]) -> float:
    """Returns the mean time of a step, but for the warm-up and for stalls.

    Of three epochs or more the first is left out, which traces and fills caches of the
    input; of others the first tenth, or 50 steps. Then the slowest and the fastest
    windows are: a machine that stalls for seconds, as virtual ones do, says nothing
    about a policy. What happens more often is in the mean, such as waits for the input.
    """
    kept = [window for window in windows if window.epoch > 0]
    if windows[-1].epoch + 1 < _MIN_EPOCHS:
        last = min(_WARMUP_PART * windows[-1].last_step, _MAX_WARMUP_STEPS)
        kept = [window for window in windows[1:] if window.last_step > last]
    kept = kept or [windows[-1]]
    kept.sort(key=lambda window: window.seconds / window.steps)
    cut = int(_TRIMMED_PART * len(kept))
    kept = kept[cut : len(kept) - cut]
    return sum(window.seconds for window in kept) / sum(w.steps for w in kept)


def train(
    model: keras.Model,
    data: Any,
    validation: Any,
    *,
    run: Run,
    epochs: int,
    batch_size: int | None = None,
    tell: Callable[[float], None] = lambda part: None,
) -> tuple[Run, Any]:
    """Trains a compiled model; returns `run` with the figures, and some inputs."""
    is_arrays, steps = isinstance(data, tuple), None
    if is_arrays:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        size, number = batch_size or 32, len(tf.nest.flatten(x)[0])
        inputs = tf.nest.map_structure(lambda each: tf.constant(each[:size]), x)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": size}
        size, steps = min(size, number), -(-number // size)
    else:
        dataset = dataset_of(data)
        _check_dataset(dataset, batch_size)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch(dataset))
        size = int(tf.nest.flatten(inputs, expand_composites=True)[0].shape[0])
        given = {"x": data if isinstance(data, keras.utils.PyDataset) else dataset}
        steps = known_length(dataset)
    timer = Clock(steps, lambda timer: tell(timer.done / epochs / (steps or math.inf)))
    with Nvml.open() or contextlib.nullcontext() as nvml:
        before = _energy_joules(nvml)
        history = model.fit(
            **given,
            validation_data=validation,
            validation_batch_size=batch_size if isinstance(validation, tuple) else None,
            epochs=epochs,
            verbose=0,
            callbacks=[timer],
        ).history
        after = _energy_joules(nvml)
    seconds = seconds_per_step(timer.windows)
    num_epochs = timer.windows[-1].epoch + 1
    # Arrays tell the mean examples of a step: the last one is shorter.
    per_step: float = size
    if is_arrays:
        per_step = len(tf.nest.flatten(data)[0]) / (timer.done // num_epochs)
    prefix = "" if validation is None else "val_"
    plain = {
        name: tuple(float(value) for value in values)
        for name, values in history.items()
        if np.ndim(values[0]) == 0
    }
    final = {
        name.removeprefix(prefix): values[-1]
        for name, values in plain.items()
        if name.startswith(prefix) and (prefix or not name.startswith("val_"))
    }
    notes, optimizer, skipped = list(run.notes), model.optimizer, 0
    if isinstance(optimizer, LossScaleOptimizer):
        skipped = int(optimizer.skipped_steps)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        why = "Keras's own loss-scale optimizer does not tell which steps it skipped."
        notes.append(why)
    points = [(w.last_step, w.loss) for w in timer.windows if w.loss is not None]
    every = math.ceil(len(points) / _MAX_POINTS) or 1
    run = dataclasses.replace(
        run,
        batch_size=size,
        num_steps=timer.done,
        num_epochs=epochs,
        examples_per_second=per_step / seconds,
        step_seconds=seconds,
        first_step_seconds=timer.windows[0].seconds,
        history=plain,
        final_metrics=final,
        num_examples=round(per_step * timer.done / num_epochs),
        losses=tuple(points[::-every][::-1]),  # the last one among them
        skipped_steps=skipped,
        energy_joules=None if before is None or after is None else after - before,
        notes=tuple(notes),
    )
    return run, inputs


def train_steps(
    model: keras.Model, parts: Any, *, run: Run, size: int, steps: int
) -> Run:
    """Trains by `fit` on batches of `size` rows of `parts`, and times the steps.

    Every step gets a batch of its own, made while the one before is trained, so that
    memory holds two of them as with a pipeline that prefetches. More than `steps` are
    timed while they are short.
    """

    def stop(timer: Clock) -> None:
        timed = timer.windows[1:]
        if sum(window.steps for window in timed) >= steps:
            seconds = sum(window.seconds for window in timed)
            model.stop_training = seconds >= _ENOUGH_SECONDS

    enlarged = functools.partial(rows, size=size)
    calls = int(getattr(model, "steps_per_execution", 1) or 1)
    dataset = (
        tf.data.Dataset.range((max(steps, _MAX_STEP_CALLS) + 1) * calls)
        .map(lambda _: tf.nest.map_structure(enlarged, parts))
        .prefetch(1)
    )
    timer = Clock(None, stop)
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    timed = timer.windows[1:] or timer.windows
    seconds = statistics.median(window.seconds / window.steps for window in timed)
    rate = size / seconds
    return dataclasses.replace(
        run, batch_size=size, examples_per_second=rate, step_seconds=seconds
    )


def _check_dataset(dataset: tf.data.Dataset, batch_size: int | None) -> None:
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is {batch_size!r}, but the training data comes in "
            "batches; expected None with a dataset. Batch the dataset so."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The training data has no end; expected a dataset that ends. Add "
            "`.take(steps)`."
        )


def _energy_joules(nvml: Nvml | None) -> float | None:
    """Returns what all GPUs have used since some time, None where one does not tell."""
    each = [reading.energy_joules for reading in (nvml.read() if nvml else ())]
    known = [joules for joules in each if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def latencies(
    model: keras.Model, inputs: Any, *, sizes: Sequence[int], jit_compile: bool = False
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size, and what went wrong.

    A call is timed from tensors on the device to numbers of the output on the host.
    Rows of `inputs` are repeated for larger sizes.
    """
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)
    found: list[Latency] = []
    for size in sizes:
        seconds: list[float] = []
        try:
            batch = tf.nest.map_structure(functools.partial(rows, size=size), inputs)
            while len(seconds) < _WARMUP_CALLS + _MAX_CALLS and (
                len(seconds) < _WARMUP_CALLS + _MIN_CALLS
                or sum(seconds[_WARMUP_CALLS:]) < _SECONDS
            ):
                began = time.perf_counter()
                outputs = tf.nest.flatten(function(batch), expand_composites=True)
                np.asarray(outputs[0])
                seconds.append(time.perf_counter() - began)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            what = f"Calls of the model with a batch of {size} were not timed"
            return tuple(found), [f"{what}: {first_line(error)}"]
        found.append(Latency.of(size, seconds[_WARMUP_CALLS:]))
    return tuple(found), []
