"""`PrecisionMonitor`: what the loss scale does, in `fit`'s logs and in files."""

import csv
import os
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import BAR_AVERAGES, FitCallback, Logs, Quiet
from tfamp.dtypes.resolution import settings_of
from tfamp.loss_scale.optimizer import LossScaleOptimizer

_EVERY, _MAX_NAMES = 100, 8
_IN_THE_BAR = ("loss_scale", "skipped_steps")
_FIELDS = (
    *("step", "loss_scale", "applied_steps", "skipped_steps", "consecutive_skips"),
    *("gradient_norm", "overflow_rate"),
)


class PrecisionMonitor(FitCallback):
    """Shows loss scale, skipped steps and gradient norm while a model trains.

    `History` gets `loss_scale`, `applied_steps`, `skipped_steps`, `consecutive_skips`,
    `gradient_norm` (unscaled, of the last finite step) and `overflow_rate` (skipped
    steps per 1,000); the progress bar the first and the third, under Keras 3.10 at an
    epoch's end only. A warning names the variables whose gradients were not finite,
    once for each set of them. Under bfloat16 and float32 no loss is scaled, and one
    line says so. Every 100 batches, at the end of an epoch, and where an error or
    Ctrl-C ends `fit`, some numbers are read from the device, half a millisecond.

    Args:
        log_dir: Folder for TensorBoard scalars of every reading, made if need be.
        csv_path: File for a row for every reading, appended to.

    Raises:
        TypeError: When training begins in float16 without `tfamp.LossScaleOptimizer`.
        ValueError: When training begins, a file cannot be written.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> guard = LossScaleOptimizer(keras.optimizers.SGD(0.1), 1.0, dynamic=False)
        >>> model.compile(guard, "mse")
        >>> data, monitor = np.ones((4, 1)), PrecisionMonitor()
        >>> run = model.fit(data, data, epochs=2, verbose=0, callbacks=[monitor])
        >>> run.history["applied_steps"], run.history["skipped_steps"]
        ([1, 2], [0, 0])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        csv_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.log_dir = None if log_dir is None else os.fspath(log_dir)
        self.csv_path = None if csv_path is None else os.fspath(csv_path)
        self._reader: Any = None  # the optimizer whose steps and skips were read
        self._counted = 0, 0
        self._files: _Files | None = None
        self._latest: dict[str, float | int] = {}
        self._warned: set[frozenset[str]] = set()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks the optimizer and opens the files."""
        self._latest = {}
        optimizer, settings = self.model.optimizer, settings_of(self.model)
        if not isinstance(optimizer, LossScaleOptimizer):
            remedy = (
                "compile with `tfamp.LossScaleOptimizer(optimizer, initial_scale=1, "
                "dynamic=False)`."
            )
            if settings and settings.compute_dtype != "float16":
                self._note(
                    f"PrecisionMonitor shows and writes nothing: {self.model.name} "
                    f"computes in {settings.compute_dtype}. For its gradients {remedy}"
                )
                return
            raise TypeError(
                f"The model's optimizer is {optimizer!r}; expected a "
                "`tfamp.LossScaleOptimizer`, whose counters a PrecisionMonitor shows. "
                f"Call `tfamp.enable` before the model is built, or {remedy}"
            )
        self._join()
        self._files = _Files(self.model, self.csv_path, self.log_dir)
        self._next_reading = 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begins to count batches anew, with a reading before the first of all."""
        # Not in `on_train_begin`: another callback may load a checkpoint there.
        if self._files is not None and not self._next_reading:
            self._read(self._files)
        self._next_reading = _EVERY

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Reads the counters if it is time, and puts the last reading into the logs."""
        if self._files is not None and batch + 1 >= self._next_reading:
            self._read(self._files)
            self._next_reading = batch + 1 + _EVERY
        if logs is not None and not BAR_AVERAGES:
            logs.update({k: v for k, v in self._latest.items() if k in _IN_THE_BAR})

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Reads the counters and puts them into the logs."""
        if self._files is not None:
            self._read(self._files)
            if logs is not None:
                for name, value in self._latest.items():
                    logs[name if name in _IN_THE_BAR else Quiet(name)] = value

    def _close(self, error: BaseException | None) -> None:
        """Closes the files, with the last steps before an error in them."""
        files, self._files = self._files, None
        if error is not None and files is not None and self._next_reading:
            self._read(files)

    def _read(self, files: "_Files") -> None:
        """Reads the counters and writes what they are now."""
        optimizer = self.model.optimizer
        now = optimizer.scale_variables.numbers()
        if self._reader is not optimizer or now.judged < self._counted[0]:
            # At first, or where older weights were loaded.
            self._reader, self._counted = optimizer, (now.judged, now.skipped)
        before, skipped = self._counted
        self._counted = now.judged, now.skipped
        self._latest = {
            "loss_scale": now.scale,
            "applied_steps": now.applied,
            "skipped_steps": now.skipped,
            "consecutive_skips": now.streak,
            "gradient_norm": now.finite_norm,
            "overflow_rate": round(1000 * now.skipped / max(now.judged, 1), 3),
        }
        if now.judged > before:
            files.write(now.judged, self._latest)
        names = optimizer.nonfinite_variables if now.skipped > skipped else ()
        if now.skipped == skipped or frozenset(names) in self._warned:
            return
        self._warned.add(frozenset(names))
        reason = "every gradient was finite, but the square of their norm was not"
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" * (len(names) > _MAX_NAMES)
            named = ", ".join(map(repr, names[:_MAX_NAMES]))
            reason = f"gradients of {named}{more} were not finite"
        logging.warning(
            "Skipped %d of the %d steps up to step %d: %s. The loss scale is %g "
            "now. A few skips at the start, or after the scale has grown, are as it "
            "should be; if they go on, lower the learning rate, clip gradients, or "
            "keep the layer in float32.",
            *(now.skipped - skipped, now.judged - before, now.judged, reason),
            now.scale,
        )


class _Files:
    """A CSV file, open only while a row is written, and TensorBoard's scalars."""

    def __init__(
        self, model: keras.Model, csv_path: str | None, log_dir: str | None
    ) -> None:
        self._csv_path = self._writer = None
        if not model.distribute_strategy.extended.should_save_summary:
            return  # this is not the chief
        if csv_path is not None:
            _begin_csv(csv_path, ",".join(_FIELDS))
            self._csv_path = csv_path
        if log_dir is not None:
            try:
                self._writer = tf.summary.create_file_writer(log_dir)
            except tf.errors.OpError as error:
                raise ValueError(
                    f"`log_dir` is {log_dir!r}, which cannot be written "
                    f"({error.message}); expected a folder for TensorBoard. Pass "
                    "another one."
                ) from error

    def write(self, step: int, values: dict[str, Any]) -> None:
        if self._csv_path is not None:
            with open(self._csv_path, "a", newline="", encoding="utf-8") as file:
                row = (step, *values.values())
                csv.writer(file, lineterminator="\n").writerow(row)
        if self._writer is not None:
            with self._writer.as_default():
                for tag, value in values.items():
                    if value is not None:
                        _write_scalar(tag, value, step)
            self._writer.flush()


def _write_scalar(tag: str, value: float, step: int) -> None:
    """Writes what `tf.summary.scalar` does, which needs TensorBoard to be installed."""
    kind = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=kind, data_class=1)  # a scalar
    tf.summary.write(tag, tf.constant(value, tf.float32), step, metadata)


def _begin_csv(path: str, header: str) -> None:
    """Writes the header of a file that is new; raises where rows cannot follow it."""
    advice = "expected a new file, or one of an earlier run. Pass another path."
    try:
        with open(path, "a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            first = file.readline().rstrip("\r\n")
            if not first:
                file.write(header + "\n")
    except (OSError, UnicodeDecodeError) as error:
        text = f"`csv_path` is {path!r}, which cannot be written ({error}); {advice}"
        raise ValueError(text) from error
    if first not in ("", header):
        found = f"`csv_path` is {path!r}, whose first line is {first[:80]!r}"
        raise ValueError(f"{found}; {advice}")
