"""Watches the calls of a model's training function, and cuts them into windows.

For the length of a `fit` the function is handed a timed iterator. On an accelerator a
call returns before the device is done, but `fit` reads the logs of each step for its
callbacks, which waits for it. Where there are no logs to read, Python runs ahead.
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfamp.callbacks._rates import Window
from tfamp.callbacks._timed_iterator import ITERATORS, Drawn, Meter, TimedIterator

# One for a model: traces of its training function are kept by the meter, so that the
# next `fit` finds them.
_METERS: "weakref.WeakKeyDictionary[keras.Model, Meter]" = weakref.WeakKeyDictionary()


class Watch:
    """Counts and times what a model trains on.

    Args:
        model: A compiled model in `fit`.
        every_steps: Batches in a window.
        batch_size: Examples in a batch, None to count them.
        is_asynchronous: Whether calls return before the device is done, as on a GPU.
            Where nothing waits for it then, only a step that begins on an idle device
            shows how long it waits: one in each window.
        clock: Gives seconds.
        wait_for_device: Returns when the device is done.
        on_window: Called with a window when it is over, and the number of batches so
            far.
        on_first_step: Called after the first step with the seconds that it took and
            what a batch is like.

    Attributes:
        has_foreign_iterator: Whether the model draws from what cannot be timed.
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
        on_first_step: Callable[[float, Any], None],
    ) -> None:
        self._steps = int(model.steps_per_execution or 1)
        self._calls_in_window = max(1, every_steps // self._steps)
        self._batch_size = batch_size
        self._is_asynchronous, self._clock = is_asynchronous, clock
        self._runs_ahead = False
        self._wait_for_device = wait_for_device
        self._on_window, self._on_first_step = on_window, on_first_step
        self._meter = _meter_of(model)
        self.has_foreign_iterator = False
        self._is_first = True
        self._iterator: Any = None
        self._timed: Any = None
        self._reset_window(0.0, Drawn(0.0, 0, 0))
        self._last_call: int | None = None
        self._calls = self._foreign_batches = 0
        self._ended = 0.0

    def begin_epoch(self, num_batches: int | None) -> None:
        """Takes the next iterator; windows begin anew.

        Args:
            num_batches: Of the epoch, None where unknown.
        """
        self._iterator = self._timed = None
        self._calls, self._in_window = 0, 0
        # Then what other callbacks do after the epoch is no part of the last window.
        self._last_call = None if not num_batches else -(-num_batches // self._steps)

    def end_window(self) -> None:
        """Ends the window that is open, if there is one."""
        if not self._in_window:
            return
        if self._runs_ahead:
            self._wait_for_device()
            self._ended = self._clock()
        self._close(self._ended)

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs the training function once."""
        if self._iterator is not iterator:
            self._adopt(iterator)
        if not self._calls and not self._is_first:
            self._start_epoch()
        num_traces = self._meter.num_traces
        logs = function(self._timed)
        self._ended = self._clock()
        self._runs_ahead = self._is_asynchronous and not logs
        self._calls += 1
        self._in_window += 1
        if self.has_foreign_iterator:
            self._foreign_batches += self._steps
        if self._runs_ahead and self._in_window == 1:
            self._sampled = self._meter.read().wait_seconds - self._drawn.wait_seconds
        if self._is_first or self._meter.num_traces != num_traces:
            self._after_slow_call()
        elif self._is_over():
            self.end_window()
        return logs

    def _adopt(self, iterator: Any) -> None:
        """Takes an iterator as that of the epoch."""
        if not isinstance(iterator, ITERATORS):
            self.has_foreign_iterator = True
            self._timed = iterator
        else:
            self._timed = TimedIterator(iterator, self._meter)
        self._iterator = iterator
        if self._is_first:
            self._reset_window(self._clock(), self._read())

    def _start_epoch(self) -> None:
        if self._runs_ahead:
            self._wait_for_device()
        self._reset_window(self._clock(), self._read())

    def _is_over(self) -> bool:
        if self._calls == self._last_call or self._in_window >= self._calls_in_window:
            return True
        # The first step of an epoch may wait for buffers to fill, which says nothing
        # of the others.
        return self._runs_ahead and self._calls == 1

    def _after_slow_call(self) -> None:
        """Begins anew after a step that was traced or compiled; tells of the first."""
        self._wait_for_device()
        seconds = self._clock() - self._started
        if self._is_first:
            self._is_first = False
            self._on_first_step(seconds, getattr(self._iterator, "element_spec", None))
        self._reset_window(self._clock(), self._read())

    def _close(self, now: float) -> None:
        drawn = self._read()
        batches = drawn.batches - self._drawn.batches
        window = Window(
            seconds=now - self._started,
            batches=batches,
            examples=self._examples(drawn, batches),
            wait_seconds=self._waited(drawn, batches),
        )
        self._on_window(window, drawn.batches)
        self._reset_window(now, drawn)

    def _read(self) -> Drawn:
        """Returns what was drawn; what a foreign iterator draws is known by calls."""
        drawn = self._meter.read()
        return drawn._replace(batches=drawn.batches + self._foreign_batches)

    def _examples(self, drawn: Drawn, batches: int) -> int | None:
        if self._batch_size is not None:
            return batches * self._batch_size
        # A step is taken on at least one example, so none means none to count.
        return drawn.examples - self._drawn.examples or None

    def _waited(self, drawn: Drawn, batches: int) -> float | None:
        if self.has_foreign_iterator or self._steps > 1:
            return None
        if self._runs_ahead:
            return self._sampled * batches
        return drawn.wait_seconds - self._drawn.wait_seconds

    def _reset_window(self, now: float, drawn: Drawn) -> None:
        """Begins a window, on an idle device."""
        self._started, self._drawn, self._in_window = now, drawn, 0
        self._sampled = 0.0


def _meter_of(model: keras.Model) -> Meter:
    if model not in _METERS:
        _METERS[model] = Meter(model.distribute_strategy)
    return _METERS[model]
