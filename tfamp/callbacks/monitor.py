"""`PrecisionMonitor`: what the loss scale does, in `fit`'s logs and in files."""

import os
from typing import Any

import keras
from absl import logging

from tfamp.callbacks._fit_callback import (
    BAR_AVERAGES,
    EventWriter,
    FitCallback,
    check_path,
)
from tfamp.dtypes.resolution import settings_of
from tfamp.loss_scale.counters import Reading, Step, StepReader
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.records import checks

_MAX_NAMES = 8
_IN_THE_BAR = ("loss_scale", "skipped_steps")


class PrecisionMonitor(FitCallback):
    """Shows loss scale, skipped steps and gradient norm while a model trains.

    `History` gets `loss_scale`, `applied_steps`, `skipped_steps`, `consecutive_skips`,
    `gradient_norm` (unscaled, of the last finite step) and `overflow_rate` (skipped
    steps per 1,000, over the last 1,000 or as many as there were), exact at the end of
    each epoch. During an epoch the progress bar, and callbacks after this one in the
    list, see the first and the third, of the last reading; under Keras 3.10, whose bar
    shows means, only at its end. A warning names the variables whose gradients were not
    finite in a skipped step, once for each set of variables.

    A second `fit` goes on counting and appends to the CSV. Where an error or Ctrl-C
    ends `fit`, the last steps before it are written too. Where tfamp's policy computes
    in bfloat16 or float32 no loss is scaled, and one line says so.

    Cost: nothing runs in a training step. A reading fetches some numbers from the
    device, half a millisecond on a CPU. No step is missing in the files as long as
    fewer than 1024 lie between two readings.

    Args:
        log_dir: Folder for TensorBoard scalars of every step, made if need be.
        csv_path: File for a row for every step, appended to. `loss_scale` is the one
            that the step was computed with, and a norm that is not finite an empty
            cell. Steps that are trained again after a restart stand there again.
        every_steps: Batches between two readings; there is one more at the end of
            each epoch.

    Raises:
        TypeError: An argument has the wrong type; or, when training begins, the
            model's optimizer is no `tfamp.LossScaleOptimizer`, though its policy is
            float16's or none of tfamp's.
        ValueError: `every_steps` is below 1; or, when training begins, a file cannot
            be written.

    Example:
        >>> import numpy as np
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
        *,
        every_steps: int = 100,
    ) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir)
        self.csv_path = check_path("csv_path", csv_path)
        self.every_steps = checks.positive_int("every_steps", every_steps)
        self._reader: StepReader | None = None
        self._events: EventWriter | None = None
        self._latest: dict[str, float | int] = {}
        self._warned: set[frozenset[str]] = set()
        self._next_reading = 0
        self._is_first_epoch = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the optimizer and opens the files."""
        self._latest = {}
        settings = settings_of(self.model)
        is_scaled = isinstance(self.model.optimizer, LossScaleOptimizer)
        if not is_scaled and settings and settings.compute_dtype != "float16":
            self._note(
                f"PrecisionMonitor shows and writes nothing: {self.model.name} "
                f"computes in {settings.compute_dtype}, which needs no loss scale. For "
                "norms of gradients compile with `tfamp.LossScaleOptimizer(optimizer, "
                "initial_scale=1, dynamic=False)`."
            )
            return
        _check_optimizer(self.model.optimizer)
        self._join()
        self._is_first_epoch = True
        self._events = EventWriter(
            self.model, Step._fields, csv_path=self.csv_path, log_dir=self.log_dir
        )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count batches anew, with a reading before the first of all."""
        # Not in `on_train_begin`: another callback may load a checkpoint there.
        if self._events is not None and self._is_first_epoch:
            self.read()
            self._is_first_epoch = False
        self._next_reading = self.every_steps

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Reads the counters if it is time, and puts the last reading into the logs."""
        if self._events is not None and batch + 1 >= self._next_reading:
            self.read()
            self._next_reading = batch + 1 + self.every_steps
        if logs is not None and not BAR_AVERAGES:
            logs.update({k: v for k, v in self._latest.items() if k in _IN_THE_BAR})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the counters and puts them into the logs."""
        if self._events is not None:
            self.read()
            if logs is not None:
                logs.update(self._latest)

    def read(self) -> dict[str, float | int]:
        """Reads the counters now and writes the steps since the last reading.

        `fit` does it; call it yourself in a loop of your own. Returns the values that
        go into the logs. A TypeError says that the optimizer is no
        `tfamp.LossScaleOptimizer`.
        """
        optimizer = self.model.optimizer
        if self._reader is None or self._reader.optimizer is not optimizer:
            _check_optimizer(optimizer)
            self._reader = StepReader(optimizer)
        reading = self._reader.read()
        self._latest = reading.logs
        if self._events is not None:
            self._events.write(reading.steps)
            if reading.num_lost and self._events.is_open and not self.notes:
                self._note(
                    f"{reading.num_lost} steps are missing from the files before step "
                    f"{reading.steps[0].step}: more than 1024 lay between two "
                    f"readings. Lower `every_steps`, now {self.every_steps}."
                )
        self._warn(reading)
        return dict(reading.logs)

    def _close(self, error: BaseException | None) -> None:
        """Closes the files, with the last steps before an error in them."""
        events = self._events
        try:
            if error is not None and not self._is_first_epoch:
                self.read()
        finally:
            self._events = None
            if events is not None:
                events.close()

    def _warn(self, reading: Reading) -> None:
        names = reading.nonfinite
        if reading.last_skip is None or frozenset(names) in self._warned:
            return
        self._warned.add(frozenset(names))
        reason = "every gradient was finite, but the square of their norm was not"
        if names:
            named = ", ".join(map(repr, names[:_MAX_NAMES]))
            num_more = len(names) - _MAX_NAMES
            more = f" and {num_more} more" if num_more > 0 else ""
            reason = f"gradients of {named}{more} were not finite"
        logging.warning(
            "Skipped %d of %d steps, the last time step %d: %s. The loss scale is %g "
            "now. A few skips at the start, or after the scale has grown, are as it "
            "should be; if they go on, lower the learning rate, clip gradients, or "
            "keep the layer in float32.",
            *(reading.num_skips, reading.num_lost + len(reading.steps)),
            *(reading.last_skip, reason, reading.logs["loss_scale"]),
        )


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, LossScaleOptimizer):
        return
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    stock = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = "optimizer.inner_optimizer" if stock else "optimizer"
    raise TypeError(
        f"The model's optimizer is {optimizer!r}, of type {kind}; expected a "
        "`tfamp.LossScaleOptimizer`, whose counters a PrecisionMonitor shows. For "
        "float16 call `tfamp.enable` before the model is built; under bfloat16 and "
        f"float32 compile with `tfamp.LossScaleOptimizer({inner}, initial_scale=1, "
        "dynamic=False)`."
    )
