"""One `fit` under NanRecovery: each call of the training function, judged."""

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.callbacks.flight_recorder.contents import built_from
from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery.failures import LastBatches, Sign
from tfamp.callbacks.nan_recovery.memory import Memory
from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.trainer import drop_traced_functions
from tfamp.stepping.bundles.record import Cause
from tfamp.stepping.snapshots.files import Background, Slots
from tfamp.stepping.snapshots.state import State, first_nonfinite, num_nonfinite

_ENDS = (StopIteration, tf.errors.OutOfRangeError)
# Looking at the scale may take this part of the time.
_SHARE_OF_SCALE = 0.001
# What a flight recorder calls a sign.
_BUNDLED: dict[str, Cause] = {
    "logs": "loss",
    "weights": "weights",
    "loss scale": "skip",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user of NanRecovery chose; see there."""

    directory: Path
    keep: int
    every_seconds: float | None
    write_every_seconds: float
    ignored: tuple[str, ...]
    clock: Callable[[], float]
    share: float = 0.005


class WatchedTraining:
    """Watches the training of one `fit`, and keeps its good snapshots.

    `on_failure` is called with the sign of a failure; it puts the model back, and
    returns or raises. `memory` is None before the first batch. `step` counts the
    batches of this `fit` and of those it resumed, and `rate_factor` is what learning
    rates are multiplied by now. `run` tells the snapshots of this run from others in
    the folder.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: Settings,
        slots: Slots,
        *,
        on_failure: Callable[[Sign], None],
    ) -> None:
        self.memory: Any = None  # a `Memory`, from the first batch on
        self.step = self.epoch = 0
        self.rate_factor = 1.0
        self.kept_layers: tuple[str, ...] = ()
        self.slots, self.run = slots, secrets.token_hex(4)
        self.writer = Background(slots, clock=settings.clock)
        self.last_logs: dict[str, Any] = {}
        self.batches = LastBatches(model)
        self._model, self._settings = model, settings
        self._on_failure = on_failure
        self._steps = int(model.steps_per_execution or 1)
        self._calls = 0
        self._num_calls: int | None = None
        self._written: State | None = None
        self._updates = 0
        self._next_write = 0.0
        self._next_scale = 0.0
        self._is_checked = True
        self.num_finite_calls = 0
        self.member: Any = None  # its part in `fit`, which the callback has joined

    def begin_epoch(self, epoch: int, num_batches: int | None) -> None:
        """Notes that an epoch begins."""
        self.epoch, self._calls, self.num_finite_calls = epoch, 0, 0
        self._num_calls = -(-num_batches // self._steps) if num_batches else None

    def begin(self, element_spec: Any) -> None:
        """Takes what training begins with as good, built as far as it can be.

        A ValueError says that it holds NaN or inf. The element spec of a batch is None
        where it is not known.
        """
        settings = self._settings
        is_whole = built_from(self._model, element_spec)
        self.memory = Memory(
            self._model,
            every_seconds=settings.every_seconds,
            share=settings.share,
            clock=settings.clock,
            is_written=self.writer.holds,
        )
        start = self.memory.good.with_counters(**self._facts(is_last=False))
        if count := num_nonfinite(start):
            raise ValueError(
                f"Training begins with {count} weights or optimizer values that are "
                f"not finite, the first in {first_nonfinite(start)!r}; expected finite "
                "ones. Load a good checkpoint, or pass `resume=True` to begin with the "
                f"last good snapshot in {str(settings.directory)!r}, if there is one."
            )
        self.memory.begin(start)
        if not is_whole:
            # The first step makes more variables, so take all as soon as they exist.
            self.memory.is_partial = True
            self.memory.take_soon()

    def trace_anew(self) -> None:
        """Makes the model's functions anew, as a change of its dtypes needs.

        What other callbacks put around the old one comes back with the next epoch.
        """
        drop_traced_functions(self._model)
        self._model.make_train_function(force=True)
        self.member.surround()

    def close(self) -> None:
        """Writes the last good snapshot, unless it was written, and lets all go."""
        memory = self.memory
        try:
            if memory is not None and memory.is_proven:
                if memory.good is not self._written:
                    self.writer.finish()
                    self.writer.start(memory.good)
            self.writer.finish()
        finally:
            self.batches.clear()
            self.memory = None

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands for the training function: one call of it, judged."""
        if self.memory is None:
            self.begin(getattr(iterator, "element_spec", None))
        try:
            is_held = self.member.stands_beside(around_training.Place.FLIGHT_RECORDER)
            logs = function(self.batches.through(iterator, is_held=is_held))
        except _ENDS:
            # Judged before anything is done with the weights at the epoch's end.
            if self._calls and (sign := self._check_weights()) is not None:
                self._fail(sign)
            raise
        except Exception as error:
            sign = failures.of_error(error)
            if sign is None:
                raise
            self._count()
            return self._fail(sign)
        self._count()
        values = failures.plain(logs)
        sign = failures.of_logs(values, ignored=self._settings.ignored) or self._look(
            values
        )
        if sign is not None:
            return self._fail(sign)
        self.num_finite_calls += 1
        self.last_logs = values
        return values if isinstance(logs, dict) else logs

    def _count(self) -> None:
        self._calls += 1
        self.step += self._steps
        self._is_checked = False

    def _fail(self, sign: Sign) -> dict[str, Any]:
        # Of the state before it is mended.
        self.member.tell_failure(_BUNDLED[sign.kind], sign.text)
        self._on_failure(sign)
        self._is_checked = True
        return self.last_logs

    def _check_weights(self) -> Sign | None:
        """Looks at the weights, unless this was done since the last step."""
        was_checked, self._is_checked = self._is_checked, True
        return None if was_checked else failures.of_weights(self._model)

    def _look(self, values: dict[str, Any]) -> Sign | None:
        """Looks at more than the logs where it is time to, and keeps snapshots."""
        memory, clock = self.memory, self._settings.clock
        memory.note_loss(values.get("loss"))
        is_last = self._calls == self._num_calls
        sign = None
        if memory.candidate is not None or memory.is_due():
            start = clock()
            sign = self._judge(values) if memory.candidate else self._take(is_last)
            memory.spend(clock() - start)
        if sign is None and is_last:
            sign = self._check_weights()
        if sign is None and (start := clock()) >= self._next_scale:
            sign = failures.of_scale(self._model)
            end = clock()
            self._next_scale = end + (end - start) / _SHARE_OF_SCALE
        return sign

    def _take(self, is_last: bool) -> Sign | None:
        memory = self.memory
        if failures.was_skipped(self._model):
            return None  # the next step may be better
        self._updates = failures.num_updates(self._model)
        self._is_checked = True
        if memory.take(**self._facts(is_last=is_last)):
            return None
        return Sign("weights", f"{memory.bad_path} holds values that are not finite")

    def _judge(self, values: dict[str, Any]) -> Sign | None:
        """Makes the candidate the good state, if the step after it was good."""
        memory = self.memory
        if failures.was_skipped(self._model):
            return None
        num_updates = failures.num_updates(self._model)
        if num_updates and num_updates <= self._updates:
            return None  # a microbatch of an update that is not made yet
        sign = self._check_weights()
        if sign is not None:
            return sign
        if memory.has_run_away(values.get("loss")):
            memory.forget()
            return None
        memory.promote()
        now = self._settings.clock()
        if now >= self._next_write and self.writer.start(memory.good):
            self._written = memory.good
            pause = self.writer.seconds / self._settings.share
            self._next_write = now + max(self._settings.write_every_seconds, pause)
        return None

    def _facts(self, *, is_last: bool) -> dict[str, Any]:
        """Returns what a snapshot says of itself."""
        return {
            "step": self.step,
            "epoch": self.epoch + is_last,
            "rate_factor": self.rate_factor,
            "kept_float32": list(self.kept_layers),
            "run": self.run,
        }
