"""Times the training steps of `fit`, in windows."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfamp.records import units

# More points than this a curve does not show.
MAX_POINTS = 400
# Of short trainings the first part warms up: caches, threads, clock rates.
_WARMUP_PART, _MAX_WARMUP_STEPS = 0.1, 50
# Of the windows that count so many at either end are left out of the rate: a machine
# that stalls for seconds, as virtual ones do, says nothing about a policy.
_TRIMMED_PART, _MIN_WINDOWS_TO_TRIM = 0.05, 8
# Stalls of this part of the time are told.
_MANY_STALLS = 0.1
# With so many epochs the first is left out: it traces, and fills caches of the input.
_MIN_EPOCHS = 3
# Steps are timed in windows: of a shorter one a clock and a read of the loss, which
# waits for the device, would be a part.
WINDOW_SECONDS = 0.1
# Of a few steps that are short, so many seconds.
_ENOUGH_SECONDS = 0.5
_PROGRESS_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Window:
    """Some training steps of an epoch that were timed together, counted from 1.

    `loss` is what was logged last; None where no loss is logged.
    """

    epoch: int
    last_step: int
    steps: int
    step_in_epoch: int
    seconds: float
    loss: float | None
    is_mean: bool = True

    @property
    def seconds_per_step(self) -> float:
        """Seconds of one of the steps."""
        return self.seconds / self.steps


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
        steps, loss = window.step_in_epoch - seen, window.loss
        if window.is_mean:
            whole = loss * window.step_in_epoch
            loss = (whole - total) / steps
            total, seen = whole if math.isfinite(whole) else 0.0, window.step_in_epoch
        points.append((window.last_step, steps, loss))
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
        self._logs: Mapping[str, Any] | None = None
        self._epoch, self._seen, self._done, self._first = 0, 0, 0, 0
        self._opened = self._began = clock()
        self._told, self._is_open = -1e9, False
        self._first_of_call, self._gives_last = 0, False

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
        now, self._logs = self._clock(), logs
        seen = self._steps_seen(batch)
        self._done, self._seen = self._done + seen - self._seen, seen
        is_first = not self.windows
        if is_first or now - self._opened >= WINDOW_SECONDS:
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
        self._opened, self._is_open = self._clock(), True
        self._first = self._done

    def _close(self) -> None:
        was_open, self._is_open = self._is_open, False
        if not was_open or self._done == self._first:
            return
        loss = None  # reading it, or the counter, waits for the device
        if self._logs and "loss" in self._logs:
            loss = float(np.asarray(self._logs["loss"]))
        elif self.model.optimizer is not None:
            np.asarray(self.model.optimizer.iterations)
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
        if self._num_steps and now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._tell(self._done / self._num_steps)

    def _is_mean(self, loss: float | None) -> bool:
        """Whether a logged loss is the mean since the epoch began, as `fit`'s own is.

        A `train_step` of the user's may log the loss of its step instead.
        """
        if type(self.model).train_step is keras.Model.train_step or loss is None:
            return True
        means = [m for m in self.model.metrics if m.name == "loss" and m.variables]
        return any(math.isclose(float(m.result()), loss, rel_tol=1e-6) for m in means)
