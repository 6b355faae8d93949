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
from tfamp.callbacks._rates import (
    Rates,
    Watch,
    Window,
    flops_of_example,
    peak_of_devices,
    rates_of,
)
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
    - `model_flops_utilisation`: FLOPs of the model over what the GPUs promise, where
      that is known or given;
    - `first_step_seconds`: the first step of each `fit`, in the first epoch's logs.
      It holds tracing and compiling, and is left out of all else, as are validation,
      later steps that are traced, and other callbacks at the ends of epochs.

    A value that cannot be had is absent, and one line says why. Keras 3.10 shows means
    over an epoch in its bar, so there they come at the end of the epoch only.

    How it sees that: for the length of `fit` the model's `train_function` gets an
    iterator that takes the time of each draw inside the traced function, which is
    therefore traced for it. With `steps_per_execution` above 1 TensorFlow draws a
    batch while it computes on the one before, so that drawing is no waiting, and
    `input_wait` is absent. On a GPU, where a `train_step` that returns no logs lets
    Python run ahead of the device, it is measured in one step of each window, when the
    device is known to be idle. A second Throughput in the same `fit` rests.

    Cost: below 1 % of a step of a millisecond. The device is waited for where `fit`
    does so, for its logs, and at the end of each window.

    Args:
        log_dir: Folder for TensorBoard scalars of every window, made if need be.
        csv_path: File for a row for every window, appended to.
        every_steps: Batches in a window; the end of an epoch ends one too.
        batch_size: Examples in a batch of all replicas; None counts them, as the
            first dimension of the first input.
        flops_per_example: FLOPs of training on an example, forward and backward; None
            takes three times those of the forward pass, counted once where the peak
            is known.
        peak_flops: Most FLOPs a second of all devices that train; None looks the GPUs
            up in a table of their maker's figures for the dtype that most weights are
            multiplied in.
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
        flops_per_example: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.every_steps = checks.positive_int("every_steps", every_steps)
        self.batch_size = batch_size
        if batch_size is not None:
            self.batch_size = checks.positive_int("batch_size", batch_size)
        self.flops_per_example = _positive_or_none(
            "flops_per_example", flops_per_example
        )
        self.peak_flops = _positive_or_none("peak_flops", peak_flops)
        self.first_step_seconds: float | None = None
        self._clock = clock
        self._watch: Watch | None = None
        self._events: EventWriter | None = None
        self._windows: list[Window] = []
        self._latest: dict[str, float] = {}
        self._flops: float | None = None
        self._peak: float | None = None
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
            on_first_step=self._take_first_step,
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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the rates of the epoch into the logs."""
        if self._watch is None:
            return
        self._watch.end_window()
        self._tell_notes()
        rates = self._rates(self._windows)
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
        return function(iterator) if watch is None else watch.call(function, iterator)

    def _take_first_step(self, seconds: float, element_spec: Any) -> None:
        """Notes the first step; the model is built now."""
        self.first_step_seconds = seconds
        self._peak, why = self.peak_flops, ""
        if self._peak is None:
            self._peak, why = peak_of_devices(self.model)
        self._flops = self.flops_per_example
        if self._peak is not None and self._flops is None:
            self._flops, why = flops_of_example(self.model, element_spec)
            why = why and f"{why}: pass `flops_per_example`"
        elif self._peak is None:
            why = f"{why}: pass `peak_flops`"
        if why:
            self._note(f"No model_flops_utilisation, since {why}.", logging.DEBUG)

    def _take_window(self, window: Window, num_batches: int) -> None:
        self._windows.append(window)
        rates = self._rates([window])
        if rates is None:
            return
        self._latest = rates.known()
        if self._events is not None:
            self._events.write([(num_batches, *rates)])

    def _rates(self, windows: list[Window]) -> Rates | None:
        return rates_of(windows, flops_per_example=self._flops, peak_flops=self._peak)

    def _tell_notes(self) -> None:
        """Says what the watch cannot see."""
        watch = self._watch
        if watch is None:
            return
        if any(window.examples is None for window in self._windows):
            self._note(
                "No examples_per_second, since batches have no first dimension to "
                "count: pass `batch_size`."
            )
        if watch.has_foreign_iterator:
            self._note(
                "No input_wait, since the model draws batches from an iterator that is "
                "none of tf.data: ask `tfamp.data.bottleneck`."
            )
        elif int(self.model.steps_per_execution or 1) > 1:
            self._note(
                "No input_wait, since with `steps_per_execution` above 1 a batch is "
                "drawn while the model computes: ask `tfamp.data.bottleneck`.",
                logging.INFO,
            )


def _positive_or_none(argument: str, value: float | None) -> float | None:
    return None if value is None else checks.positive(argument, value)
