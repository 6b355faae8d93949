"""Finds the batch at which a training fails, by training again from a good state."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import keras

from tfamp.callbacks._draws import parts_of, whole
from tfamp.callbacks.nan_recovery import failures
from tfamp.callbacks.nan_recovery.batches import Kept, holds_nonfinite
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import replaced
from tfamp.stepping.snapshots import State, take


class Found(NamedTuple):
    """The step that a failure is traced to.

    Attributes:
        kept: Its batch; None where none was held.
        batch: That batch, of all replicas as one.
        sign: How the failure showed again; None where no step failed again, and for
            all that follows.
        before: The state right ahead of the step; None where that is the one which the
            search began with.
        after: The state right behind it.
        logs: What the step returned.
        error: What it raised.
    """

    kept: Kept | None
    batch: Any
    sign: Sign | None = None
    before: State | None = None
    after: State | None = None
    logs: dict[str, Any] | None = None
    error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a step failed again."""
        return self.sign is not None


class Search:
    """Trains on batches again, the oldest first, until a step fails.

    A failure shows late where its first number is hidden, as by a ReLU that makes 0 of
    NaN: the batch at hand by then is innocent.

    The step is traced anew for the first search, and after `forget_trace`; what it does
    outside of Keras variables is done again. Names in `ignored` may be NaN or inf in
    the logs.
    """

    def __init__(self, model: keras.Model, *, ignored: Collection[str] = ()) -> None:
        self._model, self._ignored = model, ignored
        self._step: Any = None

    def forget_trace(self) -> None:
        """Has the next search trace the step anew, as a change of dtypes needs."""
        self._step = None

    def failing(self, held: Sequence[Kept]) -> Found:
        """Returns the first step that fails.

        Where no step fails again, it is the first one with NaN or inf in it, or else
        the last. The model, which has the state from which they were trained, is left
        in another one.
        """
        before: State | None = None
        batches = [whole(parts_of(self._model, each.data)) for each in held]
        with replaced(self._model, steps_per_execution=1):
            if self._step is None:
                self._step = around_training.on_batch(self._model)
            for number, batch in enumerate(batches):
                before = take(self._model, into=before)
                logs, error = None, None
                try:
                    logs = failures.plain(self._step(batch))
                    sign = self._sign_of(logs)
                except Exception as raised:
                    error, sign = raised, failures.of_error(raised)
                    if sign is None:
                        break  # it fails otherwise here: nothing can be said
                if sign is not None:
                    was = before if number else None
                    after = take(self._model)
                    return Found(held[number], batch, sign, was, after, logs, error)
        pairs = list(zip(held, batches, strict=True))
        bad = [pair for pair in pairs if holds_nonfinite(pair[1])]
        return Found(*[*bad, *pairs[-1:], (None, None)][0])

    def _sign_of(self, logs: dict[str, Any]) -> Sign | None:
        return (
            failures.of_logs(logs, ignored=self._ignored)
            or failures.of_weights(self._model)
            or failures.of_scale(self._model)
        )
