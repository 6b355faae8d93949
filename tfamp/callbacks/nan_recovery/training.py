"""One `fit` under NanRecovery: each call of the training function, judged."""

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.callbacks._draws import Draws, can_draw, num_bytes
from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.keras_hooks.trainer import drop_traced_functions
from tfamp.stepping.snapshots import State, built_from, nonfinite, take, was_skipped

_ENDS = (StopIteration, tf.errors.OutOfRangeError)
# The parts of the time that looking at the scale, and snapshots, may take.
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
    """Watches the training of one `fit`, and keeps its good snapshots in memory.

    A snapshot that was just taken may hold what breaks the next step, so it is a
    `candidate` until a step more: finite logs, finite weights, an update that was made,
    and a loss that has not run away make it `good`, and the one before `older`.

    `on_failure` is called with the sign of a failure; it puts the model back, and
    returns or raises. `step` counts the batches of this `fit`, and `rate_factor` is
    what learning rates are multiplied by now.
    """

    def __init__(
        self,
        model: keras.Model,
        every_seconds: float | None,
        ignored: Sequence[str],
        on_failure: Callable[[Sign], None],
    ) -> None:
        self.ignored = ignored
        self.good = State({}, {})
        self.older: State | None = None
        self.candidate: State | None = None
        self.step = self.epoch = 0
        self.rate_factor = 1.0
        self.member: Any = None  # its part in `fit`, which the callback has joined
        self._model, self._every_seconds = model, every_seconds
        self._on_failure = on_failure
        self._steps = int(model.steps_per_execution or 1)
        self._can_draw = can_draw(model)
        # Calls of this epoch: made, expected (-1 for unknown), and in the metrics.
        self._calls, self._num_calls, self._num_kept = 0, -1, 0
        self._last_logs: dict[str, Any] = {}
        self._has_begun = self._is_partial = self._is_proven = False
        self._is_checked = True
        self._spent = self._next = self._next_scale = 0.0
        self._reference = self._floor = math.nan
        self._updates = self._mark = self._num_drawn = self._num_bytes = 0
        self._kept: collections.deque[Kept] = collections.deque()

    def begin_epoch(self, epoch: int, num_batches: int | None) -> None:
        """Notes that an epoch begins."""
        self.epoch, self._calls, self._num_kept = epoch, 0, 0
        self._num_calls = -(-num_batches // self._steps) if num_batches else -1

    def correct(self, logs: dict[str, Any]) -> None:
        """Puts what is known into the logs of an epoch that was taken back whole."""
        if not self._num_kept:
            # Metrics of no step at all read 0, which is too good to be true.
            unknown = dict.fromkeys(self._model.get_metrics_result(), math.nan)
            known = {**unknown, **self._last_logs}
            logs.update({name: known[name] for name in known if name in logs})

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
        self._num_kept += 1
        self._last_logs = values
        return values if isinstance(logs, dict) else logs

    def trace_anew(self) -> None:
        """Makes the model's functions anew, as a change of its dtypes needs."""
        drop_traced_functions(self._model)
        self._model.make_train_function(force=True)
        self.member.surround()

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
        self._num_kept = int(state.counters["calls"]) if is_inside else 0
        self._last_logs = {**self._last_logs, **state.counters["logs"]}
        self._let_go(self._num_drawn)

    def holds_metrics(self, state: State) -> bool:
        """Returns whether the metrics of a state are those of this epoch so far."""
        counters = state.counters
        return counters["epoch"] == self.epoch and bool(counters["calls"])

    def _begin(self, element_spec: Any) -> None:
        """Takes what training begins with as good, built as far as it can be."""
        self._has_begun = True
        self._is_partial = not built_from(self._model, element_spec)
        self.good = take(self._model).with_counters(**self._facts({}, is_last=False))
        if bad := list(nonfinite(self.good)):
            raise ValueError(
                f"Training begins with {sum(count for _, count in bad)} weights or "
                f"optimizer values that are not finite, the first in {bad[0][0]!r}; "
                "expected finite ones. Load a good checkpoint."
            )
        if not self._is_partial:  # else the first step makes more variables
            self._wait()

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
        return self._last_logs

    def _check_weights(self) -> Sign | None:
        """Looks at the weights, unless this was done since the last step."""
        was_checked, self._is_checked = self._is_checked, True
        return None if was_checked else failures.of_weights(self._model)

    def _look(self, values: dict[str, Any]) -> Sign | None:
        """Looks at more than the logs where it is time to, and keeps snapshots."""
        loss: Any = values.get("loss")
        if math.isnan(self._reference) and _is_number(loss):
            self._reference, self._floor = abs(loss), _FLOOR * abs(loss)
        is_last, sign = self._calls == self._num_calls, None
        start = time.perf_counter()
        if self.candidate is not None or start >= self._next:
            if not was_skipped(self._model):  # else the next step may be better
                judged = self.candidate is not None
                sign = self._judge(loss) if judged else self._take(values, is_last)
            self._spent += time.perf_counter() - start
        if sign is None and is_last:
            sign = self._check_weights()
        if sign is None and (start := time.perf_counter()) >= self._next_scale:
            sign, end = failures.of_scale(self._model), time.perf_counter()
            self._next_scale = end + (end - start) / _SHARE_OF_SCALE
        return sign

    def _take(self, values: dict[str, Any], is_last: bool) -> Sign | None:
        """Takes a snapshot to be judged later; the sign where it is not finite."""
        self._updates, self._is_checked = failures.num_updates(self._model), True
        state = take(self._model).with_counters(**self._facts(values, is_last=is_last))
        for path, _ in nonfinite(state):
            return Sign("weights", f"{path} holds values that are not finite")
        self.candidate, self._mark = state, self._num_drawn
        return None

    def _judge(self, loss: Any) -> Sign | None:
        """Makes the candidate the good state, if the step after it was good."""
        num_updates = failures.num_updates(self._model)
        if num_updates and num_updates <= self._updates:
            return None  # a microbatch of an update that is not made yet
        if (sign := self._check_weights()) is not None:
            return sign
        if self._has_run_away(loss):
            self.failing_batches()
        elif self.candidate is not None:
            self.older = self.good if self._is_proven else None
            self.good, self.candidate = self.candidate, None
            self._is_proven, self._is_partial = True, False
            self._let_go(self._mark)
        self._wait()
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
        self._next, self._spent = time.perf_counter() + pause, 0.0

    def _facts(self, values: dict[str, Any], *, is_last: bool) -> dict[str, Any]:
        """Returns what a snapshot says of itself, beside the logs of its step."""
        return {
            "step": self.step,
            "epoch": self.epoch + is_last,
            "calls": 0 if is_last else self._calls,
            "logs": {k: v for k, v in values.items() if _is_number(v)},
            "rate_factor": self.rate_factor,
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
