"""`NanRecovery`: goes back to the last good state after a failure."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import FitCallback
from tfamp.callbacks.nan_recovery.attempts import Attempts, Recovery
from tfamp.callbacks.nan_recovery.remedies import REMEDIES
from tfamp.callbacks.nan_recovery.training import WatchedTraining
from tfamp.keras_hooks import around_training
from tfamp.records import checks
from tfamp.stepping import bundles
from tfamp.stepping.snapshot_files import folder_path, make_folder


class NanRecovery(FitCallback):
    """Goes back to the last good state when training fails, and applies a remedy.

    A failure is a loss or metric in the logs that is not finite, a weight or moving
    statistic that is not, steps that are skipped without end under a loss scale, or the
    `tfamp.LossScaleError` that follows. No other callback sees the bad state. The model
    is put back to its last good snapshot: weights, statistics, seeds, optimizers, loss
    scale and metrics, bit by bit. One of these follows, by the triage of the failing
    step, and training goes on with the next batch:

    - "drop batch": nothing else; also where the triage finds nothing;
    - "cut learning rate": the rates of all optimizers times what the triage found to
      lower the loss, or `learning_rate_factor`, from here on. A
      `LearningRateScheduler` that sets rates by itself undoes it;
    - "move loss scale": to what the triage found to be finite; else by a factor of 16;
    - "keep in float32": the layer that the triage named, optimizer state kept. What the
      model computes in then stands in `plan.json` in the folder: the next run begins
      with it by `tfamp.enable(policy="<directory>/plan.json")`.

    Where the triage says "model", training is stopped. A failure may show late, as
    behind a ReLU that makes 0 of NaN: the batches since the snapshot are trained again,
    the oldest first, until a step fails, and that one is asked about.

    A snapshot, in the memory of the host, is good once a step after it was finite and
    applied, the weights after that step were finite, all of the snapshot is, and the
    loss has not run away. The logs of an epoch get `recoveries`, their number so far;
    `recoveries.jsonl` in the folder and `model.history.recoveries` have each of them.
    The failing step is kept: a folder `failure-<step>-<cause>` in `directory` holds its
    batch, the weights and state from before it and the model, and `tfamp.triage(model,
    folder)` says why it failed, in a later process too (docs/triage.md). To go on
    after a killed process use `Resume` beside it.

    Cost: memory of the host for three copies of the weights and optimizer state, and
    for the last 256 MiB of the batches since the snapshot. Snapshots are taken so
    rarely that they cost half a percent of the time; the logs are read after each step,
    and the steps that `steps_per_execution` joins are a call each.

    Args:
        directory: Folder for bundles and the journal, made if need be.
        every_seconds: Time between snapshots; 0 takes one every second step. None
            waits two hundred times as long as the last one took.
        max_recoveries: Recoveries in one `fit` after which the next failure stops it.
        remedies: "auto" for all, or those that may be used.
        learning_rate_factor: What a cut leaves of the learning rate, in (0, 1), where
            the triage names no other.
        triage: Takes the model, as it was before the failure, and the failing batch or
            None; gives an object with `cause`, `layer` and `remedy`, as `tfamp.triage`
            does, which is asked by default.
        on_exhausted: "raise" a `RecoveryError`, or "stop" training and log the report.
        ignore: Names in the logs that may be NaN or inf.

    Attributes:
        recoveries: What was done in the last `fit`, a `Recovery` each.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A value is out of range; or, when training begins, the folder
            cannot be written, weights are not finite, or workers are several.
        RecoveryError: No recovery was left that might help.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((8, 1), np.float32)
        >>> data[5] = np.nan
        >>> recovery = NanRecovery(tempfile.mkdtemp())
        >>> run = model.fit(
        ...     data, data, batch_size=2, verbose=0, shuffle=False, callbacks=[recovery]
        ... )
        >>> run.history["recoveries"], recovery.recoveries[0].remedy
        ([1], 'drop batch')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_seconds: float | None = None,
        max_recoveries: int = 3,
        remedies: str | Sequence[str] = "auto",
        learning_rate_factor: float = 0.5,
        triage: Callable[[Any, Any], Any] | None = None,
        on_exhausted: str = "raise",
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.directory = folder_path(directory)
        self.every_seconds = every_seconds
        if every_seconds:
            self.every_seconds = checks.positive("every_seconds", every_seconds)
        self.max_recoveries = checks.positive_int(
            "max_recoveries", max_recoveries, minimum=0
        )
        self.learning_rate_factor = checks.fraction(
            "learning_rate_factor", learning_rate_factor, closed=False
        )
        self.on_exhausted = checks.choice(
            "on_exhausted", on_exhausted, ("raise", "stop")
        )
        named = (remedies,) if isinstance(remedies, str) else remedies
        self.remedies: tuple[str, ...] = REMEDIES
        if remedies != "auto":
            self.remedies = tuple(checks.choice("remedies", x, REMEDIES) for x in named)
        self.ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self.recoveries: tuple[Recovery, ...] = ()
        self._triage = triage
        self._training: WatchedTraining | None = None

    @property
    def bundles(self) -> tuple[str, ...]:
        """Folders of the failing steps of the last `fit`."""
        return tuple(each.bundle for each in self.recoveries if each.bundle)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the folder and takes its place around the training function."""
        if isinstance(
            self.model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy
        ):
            raise ValueError(
                "NanRecovery was given a model on several workers; expected one "
                "process, since nothing makes the workers go back together. Leave it "
                "out, and train with `tfamp.LossScaleOptimizer(optimizer)`, which "
                "skips a bad step on all of them alike, and `tfamp.callbacks.Resume`, "
                "which brings all back to one step."
            )
        self._leave()
        make_folder(self.directory)
        bundles.remove_leftovers(Path(self.directory))
        training = WatchedTraining(
            self.model, self.every_seconds, self.ignore, self._recover
        )
        place = around_training.Place.NAN_RECOVERY
        if not self._join(place=place, call=training.call):
            logging.warning(
                "A second NanRecovery in the same `fit` does nothing: use one."
            )
            self._leave()
            return
        self._training, training.member = training, self._member
        self._attempts = Attempts(
            self.model,
            training,
            directory=Path(self.directory),
            triage=self._triage,
            remedies=self.remedies,
            max_recoveries=self.max_recoveries,
            factor=self.learning_rate_factor,
            stops_quietly=self.on_exhausted == "stop",
        )
        self._list_recoveries()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count an epoch's batches."""
        if self._training is not None:
            self._training.begin_epoch(epoch, (self.params or {}).get("steps"))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the number of recoveries into the logs."""
        if self._training is None or logs is None:
            return
        self._training.correct(logs)
        logs["recoveries"] = len(self.recoveries)

    def _close(self, error: BaseException | None) -> None:
        self._training = None

    def _recover(self, sign: Any) -> None:
        try:
            self._attempts.recover(sign)
        finally:
            self._list_recoveries()

    def _list_recoveries(self) -> None:
        self.recoveries = tuple(self._attempts.done)
        history = getattr(self.model, "history", None)
        if history is not None:
            history.recoveries = self.recoveries
