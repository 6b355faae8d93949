"""`Throughput`: how fast a model trains, and how much of the time it waits for data."""

import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import (
    BAR_AVERAGES,
    EventWriter,
    FitCallback,
    check_path,
)
from tfamp.callbacks._rates import Rates, Watch, Window, rates_of
from tfamp.keras_hooks import around_training
from tfamp.records import checks

_FIELDS = ("step", *Rates._fields)


class Throughput(FitCallback):
    """Shows how fast a model trains, while it does.

    `fit`'s progress bar and `History` get

    - `examples_per_second`: the examples of an epoch over its time, all replicas
      together, a short last batch as what it is;
    - `step_seconds`: the median step;
    - `input_wait`: the part of the time that steps waited for their batch, in
      [0, 1]. What a faster pipeline would gain can be more, where both share the same
      cores: `tfamp.data.bottleneck` measures that;
    - `first_step_seconds`: the first step of each `fit`, in the first epoch's logs.
      It holds tracing and compiling, and is left out of all else, as are validation,
      the first step on each shape of batch, and other callbacks at the ends of epochs.

    A value that cannot be had is absent, and one line says why. Keras 3.10 shows means
    over an epoch in its bar, so there they come at the end of the epoch only.

    How it sees that: for the length of `fit` batches are drawn in Python, ahead of the
    step, where each draw is timed. A smaller last batch is traced anew then, as it is
    in `train_on_batch`. With `steps_per_execution` above 1, and on several workers, the
    steps draw their batches themselves, and `input_wait` is absent, as it is on a GPU
    with a `train_step` that returns no logs: Python runs ahead of the device there. On
    several workers pass `batch_size` to have examples counted. A second Throughput in
    the same `fit` rests.

    The device is waited for where `fit` does so, for its logs, and at the end of each
    window.

    Args:
        log_dir: Folder for TensorBoard scalars of every window, made if need be.
        csv_path: File for a row for every window, appended to.
        every_steps: Batches in a window; the end of an epoch ends one too.
        batch_size: Examples in a batch of all replicas; None counts them.
        clock: Gives seconds.

    Attributes:
        first_step_seconds: Of the last `fit`, None before.
        notes: What cannot be told and why, a line each.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is below what it may be; or, when training begins, a file
            cannot be written.

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
        csv_path: str | os.PathLike[str] | None = None,
        every_steps: int = 50,
        batch_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.every_steps = checks.positive_int("every_steps", every_steps)
        self.batch_size = batch_size
        if batch_size is not None:
            self.batch_size = checks.positive_int("batch_size", batch_size)
        self.first_step_seconds: float | None = None
        self._clock = clock
        self._watch: Watch | None = None
        self._events: EventWriter | None = None
        self._windows: list[Window] = []
        self._latest: dict[str, float] = {}
        self._is_first_epoch = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the files and takes its place around the training function."""
        if not self._join(place=around_training.Place.THROUGHPUT, call=self._call):
            self._note(
                "No rates, since another Throughput measures the same `fit`: use one."
            )
            return
        self._events = EventWriter(
            self.model, _FIELDS, csv_path=self.csv_path, log_dir=self.log_dir
        )
        self.first_step_seconds, self._latest = None, {}
        self._is_first_epoch = True
        devices = tf.config.list_logical_devices()
        self._watch = Watch(
            self.model,
            every_steps=self.every_steps,
            batch_size=self.batch_size,
            is_asynchronous=any(device.device_type != "CPU" for device in devices),
            clock=self._clock,
            wait_for_device=tf.test.experimental.sync_devices,
            on_window=self._take_window,
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to measure an epoch."""
        self._windows = []
        if self._watch is not None:
            self._watch.begin_epoch((self.params or {}).get("steps"))

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Puts the rates of the last window into the logs."""
        if logs is not None and not BAR_AVERAGES:
            logs.update(self._latest)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the window before the validation inside `fit`."""
        if self._watch is not None:
            self._watch.end_window()
            self._watch.pause()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rates of the epoch into the logs."""
        if self._watch is None:
            return
        self._watch.end_window()
        self._tell_notes()
        rates = rates_of(self._windows)
        if rates is not None and logs is not None:
            logs.update(rates.known())
        if self._is_first_epoch and logs is not None:
            if self.first_step_seconds is not None:
                logs["first_step_seconds"] = self.first_step_seconds
        self._is_first_epoch = False

    def _close(self, error: BaseException | None) -> None:
        self._watch = None
        if self._events is not None:
            self._events.close()
        self._events = None

    def _call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands around the training function, once its files are open."""
        watch = self._watch
        if watch is None:
            return function(iterator)
        logs = watch.call(function, iterator)
        self.first_step_seconds = watch.first_step_seconds
        return logs

    def _take_window(self, window: Window, num_batches: int) -> None:
        self._windows.append(window)
        rates = rates_of([window])
        if rates is None:
            return
        self._latest = rates.known()
        if self._events is not None:
            self._events.write([(num_batches, *rates)])

    def _tell_notes(self) -> None:
        """Says what the watch cannot see."""
        watch = self._watch
        if watch is None:
            return
        if any(window.examples is None for window in self._windows):
            self._note(
                "No examples_per_second, since the examples of a batch cannot be "
                "counted: pass `batch_size`."
            )
        if watch.why_no_wait:
            self._note(
                f"No input_wait, since {watch.why_no_wait}: ask "
                "`tfamp.data.bottleneck`.",
                logging.INFO,
            )
