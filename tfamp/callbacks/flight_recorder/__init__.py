"""`FlightRecorder`: the last steps before a failure, to replay them."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.callbacks._batch_ring import ring_of
from tfamp.callbacks._fit_callback import FitCallback, check_path
from tfamp.callbacks.flight_recorder.call_log import (
    FlightLog,
    before_late_error,
    core_of,
    loss_of,
)
from tfamp.callbacks.flight_recorder.contents import (
    built_from,
    contents_of,
    needs_build,
)
from tfamp.keras_hooks import around_training
from tfamp.loss_scale.interface import found_in
from tfamp.records import checks
from tfamp.records.units import format_bytes
from tfamp.stepping import bundles, snapshots
from tfamp.stepping.bundle_records import Cause
from tfamp.stepping.snapshots import tally_of

# What ends `fit` without being a failure of a step.
_HARMLESS = (StopIteration, tf.errors.OutOfRangeError)
# Most of a time that snapshots take.
_MAX_SHARE = 0.004


class FlightRecorder(FitCallback):
    """Writes a bundle when training fails, from which the failing step is replayed.

    While `fit` runs, the last batches are held, and now and then weights, slots, seeds,
    loss scale and counters are copied to the host's memory. On a failure they go into a
    folder in `directory`: `tfamp replay folder` reproduces the step in a fresh process,
    bit by bit on the same device, and says why it failed. docs/bundles.md lists what
    is in it. Failures are

    - a loss that is not finite, at the first step that returns one;
    - weights, statistics or slots that are not finite, seen at the next snapshot or
      when training ends;
    - an exception in `fit` after its first step, such as `tfamp.LossScaleError`; not
      KeyboardInterrupt;
    - with `on_skip`, each step that the loss scale skips.

    Training goes on as it would without it; where a bundle cannot be written, a warning
    says why. It stands in any order beside other callbacks, `NanRecovery` too: it sees
    the state before that one mends it. A second recorder in the same `fit` rests.

    Cost: below 1 % of the time. Batches are held without a copy. A snapshot is taken
    every `keep` batches, so that those kept lead from it to the failing step; where
    that would cost more, snapshots are rarer, and the bundle says that the failing step
    alone is replayed, from an older state. The host's memory holds two snapshots. The
    loss is read after each step, as `fit`'s progress bar does.

    Args:
        directory: Where bundles are written; made if need be.
        keep: How many batches to keep; at least `steps_per_execution`.
        max_bytes: Bound on the size of the batches that are kept.
        max_bundles: How many bundles one recorder writes at most.
        on_skip: Whether skipped steps are failures too; asks the loss scale after every
            step, which takes half a millisecond.
        build: "module:function" that returns the compiled model, for models that
            cannot be loaded from a file; `tfamp replay` calls it.
        clock: Gives seconds.

    Attributes:
        bundles: Paths of the bundles that were written.
        notes: What could not be done and why, a line each.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is below what it may be, or `build` has another form; or,
            when training begins, the directory cannot be written.

    Example:
        >>> import keras, tempfile, numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> recorder = FlightRecorder(tempfile.mkdtemp())
        >>> data = np.ones((4, 1))
        >>> _ = model.fit(data, data * np.nan, verbose=0, callbacks=[recorder])
        >>> [os.path.basename(path) for path in recorder.bundles]
        ['failure-00000001-loss']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 8,
        *,
        max_bytes: int = 2**28,
        max_bundles: int = 3,
        on_skip: bool = False,
        build: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        path = check_path("directory", directory)
        if path is None:
            raise TypeError(
                "`directory` is None; expected a folder for bundles. Pass a path."
            )
        self.directory = path
        self.keep = checks.positive_int("keep", keep)
        self.max_bytes = checks.positive_int("max_bytes", max_bytes)
        self.max_bundles = checks.positive_int("max_bundles", max_bundles)
        self.on_skip = bool(on_skip)
        self.build = _check_build(build)
        self.bundles: tuple[str, ...] = ()
        self._clock = clock
        self._log: FlightLog | None = None
        self._ring: Any = None
        self._epoch = 0
        self._late_errors = contextlib.ExitStack()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Makes the directory and takes its place around the training function."""
        folder = Path(self.directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            bundles.remove_leftovers(folder)
        except OSError as error:
            raise ValueError(
                f"`directory` is {self.directory!r}, which cannot be written "
                f"({error.strerror}); expected a folder for bundles. Pass another one."
            ) from error
        place = around_training.Place.FLIGHT_RECORDER
        if not self._join(place=place, call=self._call, on_failure=self._on_failure):
            self._note(
                "No bundles of this recorder, since another FlightRecorder records the "
                "same `fit`: use one."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        if self._log is not None:
            self._log.begin_epoch(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Looks at the weights once more, and lets batches and snapshots go."""
        if self._log is not None and self._log.num_calls:
            self._snapshot(self._log)
        self._leave()

    def _on_failure(self, cause: Cause, message: str) -> None:
        """Writes a bundle of the last call, ahead of its being mended."""
        if self._log is not None and self._log.num_calls:
            self._write(cause, f"{message}.")

    def _close(self, error: BaseException | None) -> None:
        """Writes a bundle of the step before an error; lets go of what it holds."""
        try:
            log = self._log
            if isinstance(error, Exception) and log is not None and log.num_calls:
                self._write_error(error, is_of_step=False)
        finally:
            if self._ring is not None:
                self._ring.release()
            self._late_errors.close()
            self._log = self._ring = None

    def _begin(self, iterator: Any) -> FlightLog:
        """Takes the first snapshot, after callbacks that load a checkpoint."""
        is_built = built_from(self.model, getattr(iterator, "element_spec", None))
        keep = max(self.keep, int(self.model.steps_per_execution or 1))
        self._ring = ring_of(self.model, keep=keep, max_bytes=self.max_bytes)
        self._log = FlightLog(
            self.model, self._ring, max_share=_MAX_SHARE, clock=self._clock
        )
        self._log.begin_epoch(self._epoch)
        if not is_built:
            self._log.interval = 1  # the first snapshot with all variables in it
        self._was_finite = self._weights_were_finite = True
        self._written_at, self._has_failed = -1, False
        stored = tally_of(self.model.optimizer)
        self._asks_skips = self.on_skip and stored is not None
        self._num_skipped = self._skips()
        self._late_errors.enter_context(
            before_late_error(self.model.optimizer, self._write_error)
        )
        return self._log

    def _call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Runs the training function once and looks at what came of it."""
        log = self._log or self._begin(iterator)
        if self._has_failed:
            # Another callback may have mended the model since, or gone back.
            self._has_failed = False
            log.snapshot()
        try:
            logs = function(self._ring.around(iterator))
        except _HARMLESS:
            raise
        except Exception as error:
            log.note(None)
            self._write_error(error)
            raise
        log.note(logs)
        loss = loss_of(logs)
        is_finite = loss is None or math.isfinite(loss)
        if not is_finite and self._was_finite:
            self._write("loss", f"The loss is {loss}.")
        self._was_finite = is_finite
        if self._asks_skips and (skips := self._skips()) != self._num_skipped:
            self._num_skipped = skips
            self._write("skip", "The loss scale skipped the step.")
        if log.is_due:
            self._snapshot(log)
        return logs

    def _snapshot(self, log: FlightLog) -> None:
        bad = log.snapshot()
        if bad is not None and self._weights_were_finite and self._was_finite:
            where, num = snapshots.first_nonfinite(bad), snapshots.num_nonfinite(bad)
            self._write("weights", f"{num} numbers are not finite, first in {where!r}.")
        self._weights_were_finite = bad is None
        if self._ring.num_that_fit < self.keep:
            size = format_bytes(self.max_bytes)
            self._note(
                f"Keeps {self._ring.num_that_fit} batches, not {self.keep}: more take "
                f"above {size}. Pass a larger `max_bytes`.",
            )

    def _write_error(self, error: Exception, *, is_of_step: bool = True) -> None:
        if isinstance(error, _HARMLESS):
            return
        text = str(error)
        message = found_in(text) or core_of(text)
        self._write("error", message, error, is_of_step=is_of_step)

    def _write(
        self,
        cause: Cause,
        message: str,
        error: Exception | None = None,
        *,
        is_of_step: bool = True,
    ) -> None:
        """Writes a bundle, or says why there is none; training goes on in any case."""
        log = self._log
        if log is None or self._written_at == log.num_calls:
            return
        self._has_failed = True
        if not self._ring.fetch():
            return  # an error in the code, ahead of any step
        if len(self.bundles) >= self.max_bundles:
            self._note(
                f"No more bundles: {self.max_bundles} were written. Pass a larger "
                "`max_bundles` for more."
            )
            return
        self._written_at = log.num_calls
        try:
            contents = contents_of(
                self.model,
                log,
                self._ring,
                cause=cause,
                message=message,
                error=error,
                build=self.build,
                num_asked=self.keep,
                is_of_step=is_of_step,
            )
            path = bundles.write(Path(self.directory), contents, self._save_model)
        except Exception as why:  # nothing of it may cost a run
            self._note(
                f"No bundle of the failure at step {log.num_calls} ({message}) in "
                f"{self.directory!r}, since {type(why).__name__}: {why}"
            )
            return
        self.bundles = (*self.bundles, str(path))
        logging.warning(
            "%s Replay the step with `tfamp replay %s`.", message, self.bundles[-1]
        )

    def _skips(self) -> int:
        return int(self.model.optimizer.skipped_steps) if self._asks_skips else 0

    def _save_model(self, path: Path) -> str:
        """Saves the model into a bundle; returns why another process cannot load it."""
        self.model.save(path)
        return needs_build(self.model)


def _check_build(build: Any) -> str | None:
    if build is None or (isinstance(build, str) and all(build.partition(":"))):
        return build
    raise ValueError(
        f"`build` is {build!r}; expected 'module:function', such as "
        "'recipes.train_digits:build'. Name a function that returns the compiled model."
    )
