"""Trains a model by `fit`, times its steps, and times calls of it afterwards."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.machine.nvml import Nvml
from tfamp.records import units
from tfamp.stepping.arguments import dataset_of, first_batch
from tfamp.trials.batches import rows
from tfamp.trials.run_records import Latency, Run, Spread

# Steps are timed in windows: of a shorter one a clock and a read of the loss, which
# waits for the device, would be a part.
WINDOW_SECONDS = 0.1
# Of short trainings the first part warms up: caches, threads, clock rates.
_WARMUP_PART, _MAX_WARMUP_STEPS = 0.1, 50
# With so many epochs the first is left out: it traces, and fills caches of the input.
_MIN_EPOCHS = 3
# Of the windows that count so many at either end are left out of the rate: a machine
# that stalls for seconds, as virtual ones do, says nothing about a policy.
_TRIMMED_PART, _MIN_WINDOWS_TO_TRIM = 0.05, 8
# Stalls of this part of the time are told.
_MANY_STALLS = 0.1
# More points than this a curve does not show.
_MAX_POINTS = 400
# Of a few steps that are short, so many seconds; and the most calls of them.
_ENOUGH_SECONDS, _MAX_STEP_CALLS = 0.5, 100
_PROGRESS_SECONDS = 0.5
# Of calls of a trained model, for each batch size, in so many rounds.
_WARMUP_CALLS, _MIN_CALLS, _MAX_CALLS, _SECONDS, _ROUNDS = 3, 10, 1000, 1.0, 5


class Window(NamedTuple):
    """Some training steps of an epoch that were timed together, counted from 1."""

    epoch: int
    last_step: int
    steps: int
    seconds: float
    loss: float | None  # the mean of its steps; None where no loss is logged

    @property
    def seconds_per_step(self) -> float:
        """Seconds of one of the steps."""
        return self.seconds / self.steps


class Clock(keras.callbacks.Callback):
    """Times windows of steps, with validation and the ends of epochs left out.

    Args:
        steps_an_epoch: None where that is unknown.
        num_epochs: Epochs to come.
        tell: Takes the part that is done, in [0, 1].
        enough: Ends training after so many steps beside the first window, or half a
            second of shorter ones; None trains to the end.
        clock: Seconds.
    """

    def __init__(
        self,
        steps_an_epoch: int | None,
        num_epochs: int,
        tell: Callable[[float], None] = lambda part: None,
        *,
        enough: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.first_step_seconds = 0.0
        self._steps_an_epoch, self._tell, self._clock = steps_an_epoch, tell, clock
        self._num_steps, self._enough = num_epochs * (steps_an_epoch or 0), enough
        self._logs: Mapping[str, Any] = {}
        self._epoch = self._seen = self._done = self._first = 0
        self._opened = self._began = clock()
        self._told, self._is_open = -1e9, False
        self._first_of_call, self._gives_last = 0, False
        # Of the epoch: the sum of losses up to the last window, and its steps.
        self._total, self._counted = 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Opens the first window of the epoch."""
        self._epoch, self._seen, self._total, self._counted = epoch, 0, 0.0, 0
        self._open()

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Notes the first step of a call of several."""
        self._first_of_call = batch

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Closes the window if it is long enough."""
        now, self._logs = self._clock(), logs or {}
        seen = self._steps_seen(batch)
        self._done, self._seen = self._done + seen - self._seen, seen
        is_first = not self.windows
        if not is_first and now - self._opened < WINDOW_SECONDS:
            return
        self._close()
        if is_first:
            self.first_step_seconds = self._clock() - self._began
        timed = self.windows[1:]
        if self._enough is not None and (
            sum(window.steps for window in timed) >= self._enough
            and sum(window.seconds for window in timed) >= _ENOUGH_SECONDS
        ):
            self.model.stop_training = True
        self._open()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window: what follows is no training."""
        self._close()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window that is open where there was no validation."""
        self._close()

    def _steps_seen(self, batch: int) -> int:
        """Returns the steps of this epoch so far.

        Of a call of several steps newer versions of Keras give the last one here, older
        ones the first.
        """
        self._gives_last = self._gives_last or batch > self._first_of_call
        if self._gives_last:
            return batch + 1
        seen = batch + int(self.model.steps_per_execution or 1)
        return min(seen, self._steps_an_epoch or seen)

    def _open(self) -> None:
        self._opened, self._is_open, self._first = self._clock(), True, self._done

    def _close(self) -> None:
        was_open, self._is_open = self._is_open, False
        if not was_open or self._done == self._first:
            return
        loss = None  # reading it, or the counter, waits for the device
        if "loss" in self._logs:
            loss = self._own_loss(float(np.asarray(self._logs["loss"])))
        elif self.model.optimizer is not None:
            np.asarray(self.model.optimizer.iterations)
        now = self._clock()
        steps = self._done - self._first
        self.windows.append(
            Window(self._epoch, self._done, steps, now - self._opened, loss)
        )
        if self._num_steps and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._tell(self._done / self._num_steps)

    def _own_loss(self, logged: float) -> float:
        """Returns the loss of the window's steps.

        `fit` logs the mean since the epoch began, so it is the difference of two sums.
        A `train_step` of the user's may log the loss of its step instead.
        """
        means = [m for m in self.model.metrics if m.name == "loss" and m.variables]
        is_mean = type(self.model).train_step is keras.Model.train_step or any(
            math.isclose(float(m.result()), logged, rel_tol=1e-6) for m in means
        )
        if not is_mean:
            return logged
        whole = logged * self._seen
        own = (whole - self._total) / (self._seen - self._counted)
        self._total, self._counted = (
            (whole, self._seen) if math.isfinite(whole) else (0.0, 0)
        )
        return own


def steady(windows: Sequence[Window], num_epochs: int) -> tuple[Sequence[Window], int]:
    """Returns the windows after the warm-up, and how many steps that had."""
    if num_epochs >= _MIN_EPOCHS and windows[-1].epoch > 0:
        kept = [window for window in windows if window.epoch > 0]
    else:
        last = min(_WARMUP_PART * windows[-1].last_step, _MAX_WARMUP_STEPS)
        # The first window holds the first step, which traces and compiles.
        kept = [window for window in windows[1:] if window.last_step > last]
    kept = kept or [windows[-1]]
    return kept, kept[0].last_step - kept[0].steps


def seconds_per_step(windows: Sequence[Window]) -> tuple[float, str]:
    """Returns the mean time of a step, and what a reader should know of it.

    Of eight windows the slowest and the fastest are left out, of more than forty a
    twentieth of each. What happens more often is in the mean, such as waits for the
    input.
    """
    ordered = sorted(windows, key=lambda window: window.seconds_per_step)
    number = len(ordered)
    left_out = max(int(_TRIMMED_PART * number), int(number >= _MIN_WINDOWS_TO_TRIM))
    kept, slow = ordered[left_out : number - left_out], ordered[number - left_out :]
    mean = sum(window.seconds for window in kept) / sum(w.steps for w in kept)
    lost = sum(window.seconds - mean * window.steps for window in slow)
    if lost < _MANY_STALLS * sum(window.seconds for window in windows):
        return mean, ""
    return mean, (
        f"Stalls of {units.format_seconds(lost)} in {len(slow)} of {number} windows of "
        "steps do not count."
    )


def curve(windows: Sequence[Window]) -> tuple[tuple[int, float], ...]:
    """Returns last step and loss of windows, neighbours joined to 400 points."""
    known = [window for window in windows if window.loss is not None]
    group = max(1, math.ceil(len(known) / _MAX_POINTS))
    points = []
    for start in range(0, len(known), group):
        part = known[start : start + group]
        weights = [window.steps for window in part]
        losses = np.array([window.loss for window in part], np.float64)
        loss = float(np.average(losses, weights=weights))
        points.append((part[-1].last_step, loss))
    return tuple(points)


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
    given, inputs, size, steps = _arguments(data, batch_size)
    timer = Clock(steps, epochs, tell)
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
    if not timer.windows:
        raise ValueError(
            "The training data holds no batch; expected at least one. Look at its "
            "source: a wrong path, split or filter leaves nothing."
        )
    kept, warmup_steps = steady(timer.windows, epochs)
    num_steps, last_epoch = timer.windows[-1].last_step, timer.windows[-1].epoch
    # Arrays tell the mean examples of a step: the last one is shorter.
    per_step: float = size
    if isinstance(data, tuple):
        per_step = len(tf.nest.flatten(data)[0]) / (num_steps // (last_epoch + 1))
    seconds, stalls = seconds_per_step(kept)
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
    notes = [stalls] if stalls else []
    optimizer, skipped = model.optimizer, 0
    if isinstance(optimizer, LossScaleOptimizer):
        skipped = int(optimizer.skipped_steps)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        why = "Keras's own loss-scale optimizer does not tell which steps it skipped."
        notes.append(why)
    run = dataclasses.replace(
        run,
        batch_size=size,
        num_steps=num_steps,
        num_epochs=epochs,
        examples_per_second=per_step / seconds,
        step=Spread.of([window.seconds_per_step for window in kept]),
        warmup_steps=warmup_steps,
        first_step_seconds=timer.first_step_seconds,
        history=plain,
        final_metrics=final,
        num_examples=round(per_step * num_steps / (last_epoch + 1)),
        losses=curve(timer.windows),
        skipped_steps=skipped,
        energy_joules=None if before is None or after is None else after - before,
        notes=(*run.notes, *notes),
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
    enlarged = functools.partial(rows, size=size)
    calls = int(getattr(model, "steps_per_execution", 1) or 1)
    dataset = (
        tf.data.Dataset.range((max(steps, _MAX_STEP_CALLS) + 1) * calls)
        .map(lambda _: tf.nest.map_structure(enlarged, parts))
        .prefetch(1)
    )
    timer = Clock(None, 1, enough=steps)
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    timed = timer.windows[1:] or timer.windows
    step = Spread.of([window.seconds_per_step for window in timed])
    return dataclasses.replace(
        run,
        batch_size=size,
        num_steps=timer.windows[-1].last_step,
        examples_per_second=size / step.median,
        step=step,
        first_step_seconds=timer.first_step_seconds,
    )


def _arguments(
    data: Any, batch_size: int | None
) -> tuple[dict[str, Any], Any, int, int | None]:
    """Returns the arguments of `fit`, some inputs, the batch size, steps an epoch."""
    if isinstance(data, tuple):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        size = batch_size or 32
        count = len(tf.nest.flatten(x)[0])
        inputs = tf.nest.map_structure(lambda each: tf.constant(each[:size]), x)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": size}
        return given, inputs, min(size, count), -(-count // size)
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is {batch_size!r}, but the training data comes in "
            "batches; expected None with a dataset. Batch the dataset so."
        )
    dataset = dataset_of(data)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The training data has no end; expected a dataset that ends. Add "
            "`.take(steps)`."
        )
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch(dataset))
    size = int(tf.nest.flatten(inputs, expand_composites=True)[0].shape[0])
    given = data if isinstance(data, keras.utils.PyDataset) else dataset
    return {"x": given}, inputs, size, known_length(dataset)


def _energy_joules(nvml: Nvml | None) -> float | None:
    """Returns what all GPUs have used since some time, None where one does not tell."""
    readings = () if nvml is None else nvml.read()
    each = [reading.energy_joules for reading in readings]
    known = [joules for joules in each if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def latencies(
    model: keras.Model, inputs: Any, *, sizes: Sequence[int], jit_compile: bool = False
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size, and what went wrong.

    A call is timed from tensors on the device to numbers of the output on the host.
    Rows of `inputs` are repeated for larger sizes, which take turns.
    """
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)
    clock = time.perf_counter

    def call(batch: Any) -> None:
        np.asarray(tf.nest.flatten(function(batch), expand_composites=True)[0])

    batches: dict[int, Any] = {}
    notes: list[str] = []
    for size in sizes:
        try:
            batch = tf.nest.map_structure(functools.partial(rows, size=size), inputs)
            for _ in range(_WARMUP_CALLS):
                call(batch)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            what = f"Calls of the model with a batch of {size} were not timed"
            notes.append(f"{what}: {text}")
            break
        batches[size] = batch
    seconds: dict[int, list[float]] = {size: [] for size in batches}
    for _ in range(_ROUNDS):
        for size, batch in batches.items():
            call(batch)  # caches are cold again
            began, own = clock(), 0
            while own < _MAX_CALLS // _ROUNDS and (
                own < _MIN_CALLS // _ROUNDS or clock() - began < _SECONDS / _ROUNDS
            ):
                started = clock()
                call(batch)
                seconds[size].append(clock() - started)
                own += 1
    return tuple(Latency.of(size, each) for size, each in seconds.items()), notes
