"""Rates of training out of windows of steps, and the watch that cuts these windows."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.callbacks._draws import Draws, can_draw, has_workers, num_rows
from tfamp.keras_hooks import trainer

# A batch of a new shape may be traced or compiled anew, so that its step says nothing
# of the others; where there are more shapes than these, few are.
_MAX_SHAPES = 8


class Window(NamedTuple):
    """Some steps in a row.

    Attributes:
        seconds: How long they took.
        batches: Their number.
        examples: Examples in them; None where they cannot be counted.
        wait_seconds: How much of it they waited for batches; None where that is not
            to be seen.
    """

    seconds: float
    batches: int
    examples: int | None
    wait_seconds: float | None


class Rates(NamedTuple):
    """What windows come to; None where it is not known.

    Attributes:
        examples_per_second: All examples over all of the time.
        step_seconds: The median step, each window standing for its steps.
        input_wait: Part of the time spent waiting for batches, in [0, 1].
    """

    examples_per_second: float | None
    step_seconds: float
    input_wait: float | None

    def known(self) -> dict[str, float]:
        """Returns the values that are there, by name."""
        named = self._asdict().items()
        return {name: value for name, value in named if value is not None}


def rates_of(windows: Sequence[Window]) -> Rates | None:
    """Returns the rates of windows, None where they hold no time.

    Example:
        >>> slow, fast = Window(3.0, 10, 320, 1.0), Window(1.0, 10, 320, 0.0)
        >>> rates_of([slow, fast, fast])  # 960 examples in 5 s, 1 s of it waited
        Rates(examples_per_second=192.0, step_seconds=0.1, input_wait=0.2)
    """
    windows = [window for window in windows if window.batches and window.seconds > 0]
    if not windows:
        return None
    seconds = sum(window.seconds for window in windows)
    examples = [window.examples for window in windows if window.examples is not None]
    waits = [w.wait_seconds for w in windows if w.wait_seconds is not None]
    has_all, has_waits = len(examples) == len(windows), len(waits) == len(windows)
    return Rates(
        examples_per_second=sum(examples) / seconds if has_all else None,
        step_seconds=_median_step(windows),
        input_wait=min(1.0, sum(waits) / seconds) if has_waits else None,
    )


def _median_step(windows: Sequence[Window]) -> float:
    """Returns the time of a step that half of all steps do not exceed.

    Of a window only the mean is known, which stands for each of its steps.
    """
    half, seen = sum(window.batches for window in windows) / 2, 0
    median = 0.0
    for seconds, batches in sorted((w.seconds / w.batches, w.batches) for w in windows):
        if seen < half:
            median = seconds
        seen += batches
    return median


class Watch:
    """Counts and times what a model trains on, in windows of `every_steps` batches.

    Where a call of the training function is one step, its batch is drawn here, timed
    and counted. Else examples are those that the model's loss has counted, and no wait
    is seen. `batch_size` is taken in place of either where it is given. With
    `is_asynchronous` a call may return before the device is done, as on a GPU, if
    nobody reads its logs.

    `on_window` is called with each window and the number of batches so far.
    `first_step_seconds` is known after the first call, `why_no_wait` says why the wait
    is not seen, and "" where it is.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        every_steps: int,
        batch_size: int | None,
        is_asynchronous: bool,
        clock: Callable[[], float],
        wait_for_device: Callable[[], None],
        on_window: Callable[[Window, int], None],
    ) -> None:
        self.first_step_seconds: float | None = None
        self.num_batches, self.why_no_wait = 0, ""
        self._model, self._batch_size = model, batch_size
        self._steps = int(model.steps_per_execution or 1)
        if self._steps > 1:
            self.why_no_wait = "the steps of an execution draw their batches themselves"
        elif not can_draw(model):
            self.why_no_wait = "the training function draws its batches itself"
        self._draws = not self.why_no_wait
        self._calls_in_window = max(1, every_steps // self._steps)
        self._is_asynchronous, self._runs_ahead = is_asynchronous, False
        self._clock, self._wait_for_device = clock, wait_for_device
        self._on_window = on_window
        self._function: Any = None
        self._shapes: set[tuple[Any, ...]] = set()
        self._left: int | None = None
        self._ended: float | None = None
        self._counted = self._seconds = self._waited = 0.0
        self._begin_window()

    def begin_epoch(self, num_batches: int | None) -> None:
        """Begins an epoch, of `num_batches` where known."""
        self._begin_window()
        self.pause()
        self._left = num_batches
        self._counted = 0.0

    def pause(self) -> None:
        """Leaves the time until the next call out."""
        self._ended = None

    def end_window(self) -> None:
        """Ends the window that is open, if there is one."""
        if not self._calls:
            return
        if self._runs_ahead and self._ended is not None:
            self._wait_for_device()
            now = self._clock()
            self._seconds, self._ended = self._seconds + now - self._ended, now
        examples: int | None = self._examples or None
        if self._batch_size is not None:
            examples = self._batches * self._batch_size
        wait = None if self.why_no_wait else self._waited
        window = Window(self._seconds, self._batches, examples, wait)
        self._begin_window()
        self._on_window(window, self.num_batches)

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs the training function once."""
        if self._ended is None:
            if self._runs_ahead:
                self._wait_for_device()
            self._ended = self._clock()
        self._is_new = function is not self._function
        if self._is_new:  # what is made anew is traced anew
            self._function = function
            self._shapes.clear()
        self._call = Window(0.0, 0, 0, 0.0)
        source = iterator
        if self._draws:
            source = Draws(lambda: self._draw(iterator), iterator)
        logs = function(source)
        self._runs_ahead = self._is_asynchronous and not logs
        if self._runs_ahead:
            self.why_no_wait = "nothing reads what a step returns, so Python runs ahead"
        if self._is_new and self._is_asynchronous:
            self._wait_for_device()
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        if not self._draws:
            self._count()
        self.num_batches += self._call.batches
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds
        if not self._is_new:
            self._calls += 1
            self._seconds += seconds
            self._batches += self._call.batches
            self._examples += self._call.examples or 0
            self._waited += self._call.wait_seconds or 0.0
        if self._left is not None:
            self._left -= self._steps
        # What other callbacks do after the epoch is no part of its last window.
        is_last = self._left is not None and self._left <= 0
        if is_last or self._calls >= self._calls_in_window:
            self.end_window()
        return logs

    def _draw(self, iterator: Any) -> Any:
        """Returns the next batch, timed and counted."""
        start = self._clock()
        data = next(iterator)
        wait = self._clock() - start
        self._call = Window(0.0, 1, num_rows(self._model, data), wait)
        if len(self._shapes) < _MAX_SHAPES:
            leaves = tf.nest.flatten(data, expand_composites=True)
            shape = tuple(str(getattr(leaf, "shape", "")) for leaf in leaves)
            self._is_new |= shape not in self._shapes
            self._shapes.add(shape)
        return data

    def _count(self) -> None:
        """Counts what the call has drawn by itself."""
        left = self._steps if self._left is None else max(0, self._left)
        examples = 0
        if not has_workers(self._model):  # whose counts they would have to add up
            counted = trainer.examples_recorded(self._model)
            examples = max(0, round(counted - self._counted))
            self._counted = counted
        self._call = Window(0.0, min(self._steps, left), examples, None)

    def _begin_window(self) -> None:
        self._calls = self._batches = self._examples = 0
        self._seconds = self._waited = 0.0
