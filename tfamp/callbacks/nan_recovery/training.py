"""One `fit` under NanRecovery: each call of the training function, judged."""

import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery.batches import BatchesSince
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.keras_hooks.trainer import drop_traced_functions
from tfamp.stepping.snapshot_files import Background, Slots
from tfamp.stepping.snapshots import (
    State,
    built_from,
    first_nonfinite,
    num_nonfinite,
    take,
    was_skipped,
)

_ENDS = (StopIteration, tf.errors.OutOfRangeError)
# Looking at the scale may take this part of the time.
_SHARE_OF_SCALE = 0.001
# Snapshots, and writing them, may take this part of the time.
_SHARE = 0.005
# Above this multiple of what the loss was, it is running away.
RUNAWAY = 10.0
# How fast what the loss was follows it, at each snapshot.
_FOLLOWS = 1.02
# Losses below this part of the first one are as good as it.
_FLOOR = 1e-3


class WatchedTraining:
    """Watches the training of one `fit`, and keeps its good snapshots.

    `on_failure` is called with the sign of a failure; it puts the model back, and
    returns or raises. `memory` is None before the first batch. `step` counts the
    batches of this `fit` and of those it resumed, and `rate_factor` is what learning
    rates are multiplied by now. `run` tells the snapshots of this run from others in
    the folder. `batches` holds those since the good state.

    `num_calls_kept` is how many calls of this epoch are in the metrics, and `last_logs`
    are those of the last call that was not taken back, of an earlier epoch where need
    be.
    """

    def __init__(
        self,
        model: keras.Model,
        slots: Slots,
        *,
        every_seconds: float | None,
        write_every_seconds: float,
        ignored: Sequence[str],
        clock: Callable[[], float],
        on_failure: Callable[[Sign], None],
    ) -> None:
        self.memory: Any = None  # a `Memory`, from the first batch on
        self.step = self.epoch = 0
        self.rate_factor = 1.0
        self.kept_layers: tuple[str, ...] = ()
        self.slots, self.run = slots, secrets.token_hex(4)
        self.writer = Background(slots, clock=clock)
        self.last_logs: dict[str, Any] = {}
        self.batches = BatchesSince(model)
        self.ignored = ignored
        self._model, self._clock = model, clock
        self._every_seconds, self._write_every = every_seconds, write_every_seconds
        self._on_failure = on_failure
        self._steps = int(model.steps_per_execution or 1)
        self._calls = 0
        self._num_calls: int | None = None
        self._written: State | None = None
        self._updates = self._mark = 0
        self._next_write = self._next_scale = 0.0
        self._is_checked = True
        self.num_calls_kept = 0
        self.member: Any = None  # its part in `fit`, which the callback has joined

    def begin_epoch(self, epoch: int, num_batches: int | None) -> None:
        """Notes that an epoch begins."""
        self.epoch, self._calls, self.num_calls_kept = epoch, 0, 0
        self._num_calls = -(-num_batches // self._steps) if num_batches else None

    def begin(self, element_spec: Any) -> None:
        """Takes what training begins with as good, built as far as it can be.

        A ValueError says that it holds NaN or inf. The element spec of a batch is None
        where it is not known.
        """
        is_whole = built_from(self._model, element_spec)
        self.memory = Memory(
            self._model,
            every_seconds=self._every_seconds,
            share=_SHARE,
            clock=self._clock,
            is_written=self.writer.holds,
        )
        start = self.memory.good.with_counters(**self._facts({}, is_last=False))
        if count := num_nonfinite(start):
            raise ValueError(
                f"Training begins with {count} weights or optimizer values that are "
                f"not finite, the first in {first_nonfinite(start)!r}; expected finite "
                "ones. Load a good checkpoint, or pass `resume=True` to begin with the "
                f"last good snapshot in {str(self.slots.directory)!r}, if there is one."
            )
        self.memory.begin(start, is_partial=not is_whole)

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
            self.writer.finish()
            if memory is not None and memory.is_proven:
                if memory.good is not self._written:
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
            logs = function(self.batches.through(iterator))
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
        sign = failures.of_logs(values, ignored=self.ignored) or self._look(values)
        if sign is not None:
            return self._fail(sign)
        self.num_calls_kept += 1
        self.last_logs = values
        return values if isinstance(logs, dict) else logs

    def forget(self) -> None:
        """Drops the snapshot that is not judged yet, or takes it for want of better."""
        good = self.memory.good
        self.memory.forget()
        if self.memory.good is not good:
            self.batches.begin_at(self._mark)

    def went_back(self, state: State) -> None:
        """Notes that the model is in a state of before, and its batches are gone."""
        is_inside = self.holds_metrics(state)
        self.num_calls_kept = int(state.counters["calls"]) if is_inside else 0
        self.last_logs = {**self.last_logs, **state.counters.get("logs", {})}
        self.batches.begin_at(self.batches.num_drawn)

    def holds_metrics(self, state: State) -> bool:
        """Returns whether the metrics of a state are those of this epoch so far."""
        counters = state.counters
        return counters["epoch"] == self.epoch and bool(counters.get("calls"))

    def _count(self) -> None:
        self._calls += 1
        self.step += self._steps
        self._is_checked = False

    def _fail(self, sign: Sign) -> dict[str, Any]:
        self._on_failure(sign)
        self._is_checked = True
        return self.last_logs

    def _check_weights(self) -> Sign | None:
        """Looks at the weights, unless this was done since the last step."""
        was_checked, self._is_checked = self._is_checked, True
        return None if was_checked else failures.of_weights(self._model)

    def _look(self, values: dict[str, Any]) -> Sign | None:
        """Looks at more than the logs where it is time to, and keeps snapshots."""
        memory, clock = self.memory, self._clock
        memory.note_loss(values.get("loss"))
        is_last = self._calls == self._num_calls
        sign = None
        if memory.candidate is not None or memory.is_due():
            start = clock()
            if memory.candidate:
                sign = self._judge(values)
            else:
                sign = self._take(values, is_last=is_last)
            memory.spend(clock() - start)
        if sign is None and is_last:
            sign = self._check_weights()
        if sign is None and (start := clock()) >= self._next_scale:
            sign = failures.of_scale(self._model)
            end = clock()
            self._next_scale = end + (end - start) / _SHARE_OF_SCALE
        return sign

    def _take(self, values: dict[str, Any], *, is_last: bool) -> Sign | None:
        memory = self.memory
        if was_skipped(self._model):
            return None  # the next step may be better
        self._updates = failures.num_updates(self._model)
        self._is_checked = True
        if memory.take(**self._facts(values, is_last=is_last)):
            self._mark = self.batches.num_drawn
            return None
        return Sign("weights", f"{memory.bad_path} holds values that are not finite")

    def _judge(self, values: dict[str, Any]) -> Sign | None:
        """Makes the candidate the good state, if the step after it was good."""
        memory = self.memory
        if was_skipped(self._model):
            return None
        num_updates = failures.num_updates(self._model)
        if num_updates and num_updates <= self._updates:
            return None  # a microbatch of an update that is not made yet
        sign = self._check_weights()
        if sign is not None:
            return sign
        if memory.has_run_away(values.get("loss")):
            self.forget()
            return None
        memory.promote()
        self.batches.begin_at(self._mark)
        now = self._clock()
        if now >= self._next_write and self.writer.start(memory.good):
            self._written = memory.good
            pause = self.writer.seconds / _SHARE
            self._next_write = now + max(self._write_every, pause)
        return None

    def _facts(self, values: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Returns what a snapshot says of itself, beside the logs of its step."""
        logs = {k: v for k, v in values.items() if isinstance(v, float)}
        return {
            "step": self.step,
            "epoch": self.epoch + is_last,
            "calls": 0 if is_last else self._calls,
            "logs": {k: v for k, v in logs.items() if math.isfinite(v)},
            "rate_factor": self.rate_factor,
            "kept_float32": list(self.kept_layers),
            "run": self.run,
        }


class Memory:
    """Takes snapshots so rarely that they cost no more than a share of the time.

    A snapshot that was just taken may hold what breaks the next step, so it counts as
    good only after a step more: finite logs, finite weights, an update that was made,
    and a loss that has not run away.

    They are `every_seconds` apart where that is given. `good` is the last good state,
    and `candidate` a later one, to be judged after another step. `is_proven` says that
    the good state was followed by a good step, as all are but the one that training
    begins with, and `is_partial` that it lacks variables that the first step made.
    `bad_path` is the variable that kept the last snapshot from being taken. The memory
    of a state for which `is_written` holds is not used again yet.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        every_seconds: float | None,
        share: float,
        clock: Callable[[], float],
        is_written: Callable[[State], bool],
    ) -> None:
        self.candidate: State | None = None
        self.is_proven, self.is_partial, self.bad_path = False, False, ""
        self._model, self._clock, self._is_written = model, clock, is_written
        self._every_seconds, self._share = every_seconds, share
        self._retired: list[State] = []
        self._spent, self._next = 0.0, 0.0
        self._reference: float | None = None
        self._floor = 0.0
        self.good: State = take(model)

    def begin(self, state: State, *, is_partial: bool = False) -> None:
        """Takes a state as good, such as that which training begins with."""
        self.good = state
        self._wait()
        if is_partial:
            # The first step makes more variables, so take all as soon as they exist.
            self.is_partial, self._next = True, self._clock()

    def is_due(self) -> bool:
        """Returns whether it is time for a snapshot."""
        return self.candidate is None and self._clock() >= self._next

    def take(self, **counters: Any) -> bool:
        """Takes a snapshot to be judged later; False where it is not finite itself."""
        spare = next((s for s in self._retired if not self._is_written(s)), None)
        if spare is not None:
            self._retired.remove(spare)
        state = take(self._model, into=spare).with_counters(**counters)
        path = first_nonfinite(state)
        if path is not None:
            self.bad_path = path
            self._retired.append(state)
            return False
        self.candidate = state
        return True

    def promote(self) -> None:
        """Makes the candidate the good state."""
        if self.candidate is not None:
            self._retired.append(self.good)
            self.good, self.candidate = self.candidate, None
            self.is_proven, self.is_partial = True, False
            # One that is written and one to write into are enough.
            del self._retired[:-2]
        self._wait()

    def forget(self) -> None:
        """Drops the candidate, unless there is nothing better to go back to."""
        state, self.candidate = self.candidate, None
        if state is not None and self.is_partial:
            self.good, self.is_partial = state, False
        elif state is not None:
            self._retired.append(state)
        self._wait()

    def spend(self, seconds: float) -> None:
        """Notes what a snapshot or its check took."""
        self._spent += seconds

    def note_loss(self, loss: Any) -> None:
        """Takes the first loss as what the loss was."""
        if self._reference is None and isinstance(loss, float) and math.isfinite(loss):
            self._reference, self._floor = abs(loss), _FLOOR * abs(loss)

    def is_growing(self, loss: Any) -> bool:
        """Returns whether a loss is far above what it was."""
        if self._reference is None or not isinstance(loss, float):
            return False
        return not abs(loss) <= RUNAWAY * max(self._reference, self._floor)

    def has_run_away(self, loss: Any) -> bool:
        """As `is_growing`, once for each snapshot.

        What the loss was follows it slowly, so that one which stays high is taken for
        the new state of things in the end.
        """
        is_away = self.is_growing(loss)
        if self._reference is not None and isinstance(loss, float):
            followed = min(abs(loss), self._reference * _FOLLOWS)
            self._reference = max(followed, self._floor)
        return is_away

    def _wait(self) -> None:
        """Sets the time of the next snapshot, by what this one has cost."""
        by_cost = self._spent / self._share
        pause = by_cost if self._every_seconds is None else self._every_seconds
        self._next, self._spent = self._clock() + pause, 0.0
