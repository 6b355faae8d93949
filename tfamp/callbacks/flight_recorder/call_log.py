"""What a recorder remembers of a `fit`: the last calls, and the state before them."""

import collections
import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfamp.callbacks._batch_ring import BatchRing
from tfamp.keras_hooks.patches import replaced
from tfamp.stepping import snapshots
from tfamp.stepping.bundle_records import Call, hexed
from tfamp.stepping.snapshots import tally_of
from tfamp.stepping.unchanged import take_random


def before_late_error(
    optimizer: Any, write: Callable[[Exception], None]
) -> contextlib.AbstractContextManager[None]:
    """Has `write` told of the error that XLA could not raise in the step, ahead of it.

    That is in the block alone, and where the optimizer raises such an error.
    """
    if tally_of(optimizer) is None:
        return contextlib.nullcontext()
    original = optimizer.late_stop_error

    def late_stop_error() -> Exception:
        error: Exception = original()
        write(error)
        return error

    return replaced(optimizer, late_stop_error=late_stop_error)


def loss_of(logs: Any) -> float | None:
    """Returns the loss in what a step returned, None where there is none."""
    try:
        return float(logs["loss"])
    except (KeyError, TypeError, ValueError):
        return None


def core_of(text: str) -> str:
    """Returns the line of an error's text that says what is wrong.

    TensorFlow puts the place in the user's code before it, and nodes after it.

    Example:
        >>> core_of(chr(10).join(["Graph execution error:", "at x", "is inf", "[[y"]))
        'is inf'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Graph execution error"):
        lines = [line for line in lines if not line.startswith("[[")][::-1]
    return lines[0] if lines else "An exception without a message."


def calls_to_next(
    snapshot_seconds: float, call_seconds: float, num_kept: int, *, max_share: float
) -> int:
    """Returns after how many calls of the training function the next snapshot is due.

    With at most `num_kept` calls between two snapshots, the batches that are kept lead
    from the last one to any failing step. Where that costs more than `max_share` of the
    time, snapshots are rarer.

    Example:
        >>> calls_to_next(0.001, 0.1, 8, max_share=0.01)
        8
        >>> calls_to_next(0.5, 0.1, 8, max_share=0.01)
        500
    """
    if not call_seconds > 0:
        return num_kept
    return max(num_kept, math.ceil(snapshot_seconds / (max_share * call_seconds)))


# Batches of more calls are not kept, however small they are: replaying takes time.
_MAX_CALLS = 1000


class Before(NamedTuple):
    """The state from before a failure.

    Attributes:
        state: The model's variables.
        step: Batches drawn before it was taken.
        random: States of random generators.
        learning_rate: The rate then, None where it is not one number.
    """

    state: snapshots.State
    step: int
    random: dict[str, np.ndarray]
    learning_rate: float | None


class _Seen(NamedTuple):
    """A call of the training function; `first` batches were drawn before its epoch."""

    epoch: int
    number: int
    epoch_first: int
    logs: Any


class FlightLog:
    """Remembers what leads to a failure of the model that trains.

    `before` is the last state in which every number was finite, `num_calls` counts the
    calls of the training function, and `interval` is how many of them lie between the
    last snapshot and the next. Snapshots may take `max_share` of the time.
    """

    def __init__(
        self,
        model: keras.Model,
        ring: BatchRing,
        *,
        max_share: float,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._ring = model, ring
        self._max_share, self._clock = max_share, clock
        self.steps = int(model.steps_per_execution or 1)
        self.num_calls = self._in_epoch = 0
        self._epoch, self._epoch_first = 0, 0
        self._least = ring.keep
        self._calls: collections.deque[_Seen] = collections.deque(maxlen=ring.keep)
        self._spare: snapshots.State | None = None
        self._since_fetch = self._since_snapshot = self._in_window = 0
        self._window_began: float | None = None
        self.interval = max(1, ring.keep // self.steps)
        self.before = self._take(0)

    def begin_epoch(self, epoch: int) -> None:
        """Notes that the next call is the first of an epoch."""
        self._epoch, self._in_epoch = epoch, 0
        self._epoch_first = self._ring.fetch()

    def note(self, logs: Any) -> None:
        """Notes a call that returned `logs`, or raised where they are None."""
        self._calls.append(_Seen(self._epoch, self._in_epoch, self._epoch_first, logs))
        self.num_calls += 1
        self._in_epoch += 1
        self._since_fetch += self.steps
        self._since_snapshot += 1
        if self._window_began is None:
            self._window_began = self._clock()  # the first call traced
        else:
            self._in_window += 1
        if self._since_fetch >= self._ring.calls_between:
            self._ring.fetch()
            self._since_fetch = 0
        if self.num_calls == 1:  # now the size of a batch is known
            self.interval = min(self.interval, self._num_kept())

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._since_snapshot >= self.interval

    def snapshot(self) -> snapshots.State | None:
        """Takes a snapshot, which becomes the state before if all in it is finite.

        It is returned where something in it is not finite.
        """
        began, num_calls = self._clock(), self._in_window
        taken = self._take(self._ring.fetch())
        is_finite = snapshots.num_nonfinite(taken.state) == 0
        ended = self._clock()
        if self._window_began is not None and num_calls:
            # Batches are kept for as long as it is to the next snapshot.
            least = self._num_kept()
            self.interval = calls_to_next(
                ended - began,
                (began - self._window_began) / num_calls,
                least,
                max_share=self._max_share,
            )
            wanted = min(self.interval, _MAX_CALLS)
            self._ring.keep = max(self._least, wanted * self.steps)
            self._calls = collections.deque(self._calls, maxlen=max(wanted, least))
        self._window_began, self._in_window, self._since_snapshot = ended, 0, 0
        if not is_finite:
            self._spare = None  # it goes into a bundle, perhaps
            return taken.state
        self._spare, self.before = self.before.state, taken
        return None

    def calls(self) -> tuple[Call, ...]:
        """Returns the last calls whose batches are all kept, the oldest first."""
        self._ring.fetch()
        kept = self._ring.batches()
        if not kept:
            return ()
        oldest, end = kept[0].number, self._ring.num_drawn
        found = []
        for seen in self._calls:
            first = seen.epoch_first + seen.number * self.steps
            if first < oldest or first >= end:
                continue
            following = [
                other.epoch_first for other in self._calls if other.epoch_first > first
            ]
            last = min([first + self.steps, end, *following])
            found.append(
                Call(
                    epoch=seen.epoch,
                    index=first - seen.epoch_first,
                    first=first,
                    num_batches=last - first,
                    logs=hexed(seen.logs),
                )
            )
        return tuple(found)

    def _take(self, step: int) -> Before:
        state = snapshots.take(self._model, into=self._spare)
        return Before(state, step, take_random(), learning_rate_of(self._model))

    def _num_kept(self) -> int:
        """Returns the calls whose batches are kept at least, as far as is known."""
        return max(1, min(self._least, self._ring.num_that_fit) // self.steps)


def learning_rate_of(model: Any) -> float | None:
    """Returns the learning rate of a model's optimizer, where it is one number."""
    optimizer = getattr(model, "optimizer", None)
    try:
        rate = float(optimizer.learning_rate)  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None
    return rate if math.isfinite(rate) else None
