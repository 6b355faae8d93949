"""One `fit` under NanRecovery: each call of the training function, judged."""

import collections
import concurrent.futures
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks._draws import Draws, can_draw, num_bytes
from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.keras_hooks.trainer import drop_traced_functions
from tfamp.stepping.snapshot_files import Folder
from tfamp.stepping.snapshots import State, built_from, nonfinite, take, was_skipped

_ENDS = (StopIteration, tf.errors.OutOfRangeError)
# The parts of the time that looking at the scale, and snapshots and writes, may take.
_SHARE_OF_SCALE, _SHARE = 0.001, 0.005
# Above this multiple of what the loss was, it is running away; what it was follows it
# so fast at each snapshot; losses below this part of the first one are as good as it.
_RUNAWAY, _FOLLOWS, _FLOOR = 10.0, 1.02, 1e-3
# What may be held of batches since the last good state, in number and size.
_MAX_KEPT, _MAX_BYTES = 1000, 2**28


class Kept(NamedTuple):
    """A batch that is held, how many were drawn before it, and its size."""

    number: int
    data: Any
    num_bytes: int


class WatchedTraining:
    """Watches the training of one `fit`, and keeps its good snapshots.

    A snapshot that was just taken may hold what breaks the next step, so it is a
    `candidate` until a step more: finite logs, finite weights, an update that was made,
    and a loss that has not run away make it `good`. They are so rare that they cost no
    more than a share of the time, or `every_seconds` apart; a thread writes them.

    `on_failure` is called with the sign of a failure; it puts the model back, and
    returns or raises. `step` counts the batches of this `fit` and of those it resumed,
    `rate_factor` is what learning rates are multiplied by now, and `run` tells the
    snapshots of this run from others in the folder. `num_calls_kept` is how many calls
    of this epoch are in the metrics, and `last_logs` are those of the last call that
    was not taken back.
    """

    def __init__(
        self,
        model: keras.Model,
        folder: Folder,
        *,
        every_seconds: float | None,
        write_every_seconds: float,
        ignored: Sequence[str],
        clock: Callable[[], float],
        on_failure: Callable[[Sign], None],
    ) -> None:
        self.folder, self.ignored, self.run = folder, ignored, secrets.token_hex(4)
        self.good = State({}, {})
        self.candidate: State | None = None
        self.step = self.epoch = self.num_calls_kept = 0
        self.rate_factor, self.kept_layers = 1.0, tuple[str, ...]()
        self.last_logs: dict[str, Any] = {}
        self.member: Any = None  # its part in `fit`, which the callback has joined
        self._model, self._clock, self._on_failure = model, clock, on_failure
        self._every_seconds, self._write_every = every_seconds, write_every_seconds
        self._steps, self._can_draw = (
            int(model.steps_per_execution or 1),
            can_draw(model),
        )
        self._calls, self._num_calls = 0, -1
        self._has_begun = self._is_proven = self._is_partial = False
        self._is_checked = True
        self._spent = self._next = self._next_scale = self._next_write = 0.0
        self._reference = self._floor = math.nan
        self._updates = self._mark = self._num_drawn = self._num_bytes = 0
        self._kept: collections.deque[Kept] = collections.deque()
        self._threads = concurrent.futures.ThreadPoolExecutor(1)
        self._write: concurrent.futures.Future[None] | None = None
        self._write_seconds, self._has_warned = 0.0, False
        self._written: State | None = None

    def begin_epoch(self, epoch: int, num_batches: int | None) -> None:
        """Notes that an epoch begins."""
        self.epoch, self._calls, self.num_calls_kept = epoch, 0, 0
        self._num_calls = -(-num_batches // self._steps) if num_batches else -1

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands for the training function: one call of it, judged."""
        if not self._has_begun:
            self._begin(getattr(iterator, "element_spec", None))
        source = iterator
        try:
            if self._can_draw:
                source = Draws(lambda: self._hold(next(iterator)), iterator)
            logs = function(source)
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

    def trace_anew(self) -> None:
        """Makes the model's functions anew, as a change of its dtypes needs.

        What other callbacks put around the old one comes back with the next epoch.
        """
        drop_traced_functions(self._model)
        self._model.make_train_function(force=True)
        self.member.surround()

    def finish_write(self) -> None:
        """Waits for the write that is under way, if there is one."""
        if self._write is not None:
            self._write.result()

    def close(self) -> None:
        """Writes the last good snapshot, unless it was written, and lets all go."""
        try:
            if self._is_proven and self.good is not self._written:
                self.finish_write()
                self._write = self._threads.submit(self._save, self.good)
        finally:
            self._threads.shutdown()
            self._kept.clear()

    def failing_batches(self) -> list[Kept]:
        """Returns the batches that are held, the oldest first; the candidate goes.

        Unless there is nothing better to go back to: then it is taken as good.
        """
        if self.candidate is not None and self._is_partial:
            self.good, self._is_partial = self.candidate, False
            self._let_go(self._mark)
        self.candidate = None
        return list(self._kept)

    def went_back(self, state: State) -> None:
        """Notes that the model is in a state of before, and its batches are gone."""
        self.good = state
        self._wait()
        is_inside = self.holds_metrics(state)
        self.num_calls_kept = int(state.counters["calls"]) if is_inside else 0
        self.last_logs = {**self.last_logs, **state.counters.get("logs", {})}
        self._let_go(self._num_drawn)

    def holds_metrics(self, state: State) -> bool:
        """Returns whether the metrics of a state are those of this epoch so far."""
        counters = state.counters
        return counters["epoch"] == self.epoch and bool(counters.get("calls"))

    def _begin(self, element_spec: Any) -> None:
        """Takes what training begins with as good, built as far as it can be."""
        self._has_begun = True
        self._is_partial = not built_from(self._model, element_spec)
        self.good = take(self._model).with_counters(**self._facts({}, is_last=False))
        if bad := list(nonfinite(self.good)):
            raise ValueError(
                f"Training begins with {sum(count for _, count in bad)} weights or "
                f"optimizer values that are not finite, the first in {bad[0][0]!r}; "
                "expected finite ones. Load a good checkpoint, or pass `resume=True` "
                f"to begin with the last good snapshot in {self.folder.directory!r}, "
                "if there is one."
            )
        self._wait()
        if self._is_partial:
            # The first step makes more variables, so take all as soon as they exist.
            self._next = self._clock()

    def _hold(self, data: Any) -> Any:
        """Holds a batch on its way, without a copy; the newest at least stays."""
        self._kept.append(Kept(self._num_drawn, data, num_bytes(data)))
        self._num_drawn += 1
        self._num_bytes += self._kept[-1].num_bytes
        while len(self._kept) > _MAX_KEPT or (
            self._num_bytes > _MAX_BYTES and len(self._kept) > 1
        ):
            self._num_bytes -= self._kept.popleft().num_bytes
        return data

    def _let_go(self, number: int) -> None:
        """Forgets the batches before a number."""
        while self._kept and self._kept[0].number < number:
            self._num_bytes -= self._kept.popleft().num_bytes

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
        clock = self._clock
        loss: Any = values.get("loss")
        if math.isnan(self._reference) and _is_number(loss):
            self._reference, self._floor = abs(loss), _FLOOR * abs(loss)
        is_last, sign = self._calls == self._num_calls, None
        if self.candidate is not None or clock() >= self._next:
            start = clock()
            sign = self._judge(loss) if self.candidate else self._take(values, is_last)
            self._spent += clock() - start
        if sign is None and is_last:
            sign = self._check_weights()
        if sign is None and (start := clock()) >= self._next_scale:
            sign, end = failures.of_scale(self._model), clock()
            self._next_scale = end + (end - start) / _SHARE_OF_SCALE
        return sign

    def _take(self, values: dict[str, Any], is_last: bool) -> Sign | None:
        """Takes a snapshot to be judged later; the sign where it is not finite."""
        if was_skipped(self._model):
            return None  # the next step may be better
        self._updates, self._is_checked = failures.num_updates(self._model), True
        state = take(self._model).with_counters(**self._facts(values, is_last=is_last))
        for path, _ in nonfinite(state):
            return Sign("weights", f"{path} holds values that are not finite")
        self.candidate, self._mark = state, self._num_drawn
        return None

    def _judge(self, loss: Any) -> Sign | None:
        """Makes the candidate the good state, if the step after it was good."""
        if was_skipped(self._model):
            return None
        num_updates = failures.num_updates(self._model)
        if num_updates and num_updates <= self._updates:
            return None  # a microbatch of an update that is not made yet
        if (sign := self._check_weights()) is not None:
            return sign
        if self._has_run_away(loss):
            self.failing_batches()
            self._wait()
            return None
        if self.candidate is not None:
            self.good, self.candidate = self.candidate, None
        self._is_proven, self._is_partial = True, False
        self._wait()
        self._let_go(self._mark)
        now, is_free = self._clock(), self._write is None or self._write.done()
        if now >= self._next_write and is_free:
            self._written = self.good
            self._write = self._threads.submit(self._save, self.good)
            pause = self._write_seconds / _SHARE
            self._next_write = now + max(self._write_every, pause)
        return None

    def _has_run_away(self, loss: Any) -> bool:
        """Returns whether a loss is far above what it was, once for each snapshot.

        What the loss was follows it slowly, so that one which stays high is taken for
        the new state of things in the end.
        """
        if math.isnan(self._reference) or not _is_number(loss):
            return False
        is_away = abs(loss) > _RUNAWAY * max(self._reference, self._floor)
        followed = min(abs(loss), self._reference * _FOLLOWS)
        self._reference = max(followed, self._floor)
        return is_away

    def _wait(self) -> None:
        """Sets the time of the next snapshot, by what this one has cost."""
        by_cost = self._spent / _SHARE
        pause = by_cost if self._every_seconds is None else self._every_seconds
        self._next, self._spent = self._clock() + pause, 0.0

    def _save(self, state: State) -> None:
        start = self._clock()
        try:
            self.folder.write(state)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logging.warning(
                    "A good snapshot could not be written to %r (%s). Training goes "
                    "on, and the next one is tried too. Free space there.",
                    self.folder.directory,
                    error,
                )
        self._write_seconds = self._clock() - start

    def _facts(self, values: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Returns what a snapshot says of itself, beside the logs of its step."""
        return {
            "step": self.step,
            "epoch": self.epoch + is_last,
            "calls": 0 if is_last else self._calls,
            "logs": {k: v for k, v in values.items() if _is_number(v)},
            "rate_factor": self.rate_factor,
            "kept_float32": list(self.kept_layers),
            "run": self.run,
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
