"""Times the training steps of `fit`, in windows."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.loss_scale.counters import StepReader
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.records import units
from tfamp.trials.processes import Line
from tfamp.trials.run_records import MAX_POINTS

# Of short trainings the first part warms up: caches, threads, clock rates.
_WARMUP_PART = 0.1
_MAX_WARMUP_STEPS = 50
# Of the windows that count so many at either end are left out of the rate: a machine
# that stalls for seconds, as virtual ones do, says nothing about a policy.
_TRIMMED_PART = 0.05
_MIN_WINDOWS_TO_TRIM = 8
# Stalls of this part of the time are told.
_MANY_STALLS = 0.1
# With so many epochs the first is left out: it traces, and fills caches of the input.
_MIN_EPOCHS = 3
# Steps are timed in windows: of a shorter one a clock and a read of the loss, which
# waits for the device, would be a part.
WINDOW_SECONDS = 0.1
# The optimizer keeps its last 1024 steps.
_READ_STEPS = 500
_PROGRESS_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Window:
    """Some training steps of an epoch, from 0, that were timed together.

    `loss` is what was logged last; None where no loss is logged.
    """

    epoch: int
    last_step: int
    steps: int
    step_in_epoch: int
    seconds: float
    loss: float | None
    is_mean: bool = True


def steady(
    windows: Sequence[Window], *, num_epochs: int
) -> tuple[tuple[Window, ...], int]:
    """Returns the windows after the warm-up, and how many steps that had."""
    if num_epochs >= _MIN_EPOCHS and windows[-1].epoch > 0:
        kept = tuple(window for window in windows if window.epoch > 0)
    else:
        last = min(_WARMUP_PART * windows[-1].last_step, _MAX_WARMUP_STEPS)
        # The first window holds the first step, which traces and compiles.
        kept = tuple(window for window in windows[1:] if window.last_step > last)
    kept = kept or tuple(windows[-1:])
    return kept, kept[0].last_step - kept[0].steps


def seconds_per_step(windows: Sequence[Window]) -> tuple[float, str]:
    """Returns the mean time of a step, and what a reader should know of it.

    Of eight windows the slowest and the fastest are left out, of forty two of each, of
    more a twentieth of each. What happens more often is in the mean, such as waits
    for the input.
    """
    ordered = sorted(windows, key=lambda window: window.seconds / window.steps)
    num_left_out = max(
        int(_TRIMMED_PART * len(ordered)), int(len(ordered) >= _MIN_WINDOWS_TO_TRIM)
    )
    kept = ordered[num_left_out : len(ordered) - num_left_out]
    mean = sum(window.seconds for window in kept) / sum(w.steps for w in kept)
    slow = ordered[len(ordered) - num_left_out :]
    lost = sum(window.seconds - mean * window.steps for window in slow)
    total = sum(window.seconds for window in windows)
    if lost < _MANY_STALLS * total:
        return mean, ""
    return mean, (
        f"Stalls of {units.format_seconds(lost)} in {len(slow)} of {len(ordered)} "
        "windows of steps do not count."
    )


def curve(
    windows: Sequence[Window], max_points: int = MAX_POINTS
) -> tuple[tuple[int, float], ...]:
    """Returns last step and loss of windows, neighbours joined to `max_points`.

    `fit` logs the mean since the epoch began, so a window's own loss is the difference
    of two sums.
    """
    points: list[tuple[int, int, float]] = []
    total, seen, epoch = 0.0, 0, -1
    for window in windows:
        if window.epoch != epoch:
            total, seen, epoch = 0.0, 0, window.epoch
        if window.loss is None:
            continue
        steps = window.step_in_epoch - seen
        if not window.is_mean:
            points.append((window.last_step, steps, window.loss))
            continue
        whole = window.loss * window.step_in_epoch
        points.append((window.last_step, steps, (whole - total) / steps))
        total, seen = whole if math.isfinite(whole) else 0.0, window.step_in_epoch
    group = max(1, math.ceil(len(points) / max_points))
    joined = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        weight = sum(steps for _, steps, _ in part)
        loss = sum(steps * loss for _, steps, loss in part) / weight
        joined.append((part[-1][0], loss))
    return tuple(joined)


class Clock(keras.callbacks.Callback):
    """Times windows of steps, with validation and the ends of epochs left out.

    `steps_an_epoch` is None where that is unknown.
    """

    def __init__(
        self,
        steps_an_epoch: int | None,
        num_epochs: int,
        line: Line,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.first_step_seconds = 0.0
        self.scales: list[tuple[int, float]] = []
        self._steps_an_epoch, self._line, self._clock = steps_an_epoch, line, clock
        self._num_steps = num_epochs * (steps_an_epoch or 0)
        self._reader: StepReader | None = None
        self._logs: Mapping[str, Any] | None = None
        self._epoch, self._seen, self._done, self._read_at = 0, 0, 0, 0
        self._opened = self._began = clock()
        self._told = -1e9
        self._is_open = False
        self._first_of_call, self._gives_last = 0, False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reads the loss scale of each step from here on."""
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            self._reader = StepReader(optimizer)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Opens the first window of the epoch."""
        self._epoch, self._seen = epoch, 0
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
        now = self._clock()
        self._logs = logs
        seen = self._steps_seen(batch)
        self._done += seen - self._seen
        self._seen = seen
        is_first = not self.windows
        if is_first or now - self._opened >= WINDOW_SECONDS:
            self._close()
            if is_first:
                self.first_step_seconds = self._clock() - self._began
            self._open()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window: what follows is no training."""
        self._close()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window that is open where there was no validation."""
        self._close()
        self.read_scales()

    def read_scales(self) -> None:
        """Notes the loss scale of each step since the last time."""
        self._read_at = self._done
        if self._reader is not None:
            for step in self._reader.read().steps:
                self.scales.append((step.step, step.loss_scale))

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
        self._opened, self._is_open = self._clock(), True
        self._first = self._done

    def _close(self) -> None:
        was_open, self._is_open = self._is_open, False
        if not was_open or self._done == self._first:
            return
        loss = self._loss()
        now = self._clock()
        self.windows.append(
            Window(
                epoch=self._epoch,
                last_step=self._done,
                steps=self._done - self._first,
                step_in_epoch=self._seen,
                seconds=now - self._opened,
                loss=loss,
                is_mean=self._is_mean(loss),
            )
        )
        if self._done - self._read_at >= _READ_STEPS:
            self.read_scales()
        if self._num_steps and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._line.tell(self._done / self._num_steps)

    def _loss(self) -> float | None:
        """Returns the loss that was logged last; reading it waits for the device."""
        if self._logs and "loss" in self._logs:
            return float(np.asarray(self._logs["loss"]))
        np.asarray(self.model.optimizer.iterations)
        return None

    def _is_mean(self, loss: float | None) -> bool:
        """Whether a logged loss is the mean since the epoch began, as `fit`'s own is.

        A `train_step` of the user's may log the loss of its step instead.
        """
        if type(self.model).train_step is keras.Model.train_step or loss is None:
            return True
        means = [m for m in self.model.metrics if m.name == "loss" and m.variables]
        return any(math.isclose(float(m.result()), loss, rel_tol=1e-6) for m in means)
