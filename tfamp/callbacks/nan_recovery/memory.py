"""The good snapshot in memory, and the one that has yet to prove itself.

A snapshot that was just taken may hold what breaks the next step, so it counts as good
only after a step more: finite logs, finite weights, an update that was made, and a loss
that has not run away.
"""

import math
from collections.abc import Callable
from typing import Any

import keras

from tfamp.stepping.snapshots.state import State, first_nonfinite, take

# Above this multiple of what the loss was, it is running away.
RUNAWAY = 10.0
# How fast what the loss was follows it, at each snapshot.
_FOLLOWS = 1.02
# Losses below this part of the first one are as good as it.
_FLOOR = 1e-3


class Memory:
    """Takes snapshots so rarely that they cost no more than a share of the time.

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

    def begin(self, state: State) -> None:
        """Takes a state as good, such as that which training begins with."""
        self.good = state
        self._wait()

    def take_soon(self) -> None:
        """Makes the next snapshot due at once."""
        self._next = self._clock()

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
        if self.candidate is not None and self.is_partial:
            self.good, self.candidate = self.candidate, None
            self.is_partial = False
        elif self.candidate is not None:
            self._retired.append(self.candidate)
            self.candidate = None
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
        pause = self._every_seconds
        if pause is None:
            pause = self._spent / self._share
        self._next, self._spent = self._clock() + pause, 0.0
