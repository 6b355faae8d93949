"""Finds the batch at which a training fails, by training again from a good state."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import keras

from tfamp.callbacks._batch_ring import holds_nonfinite
from tfamp.callbacks.nan_recovery import failures
from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import replaced
from tfamp.stepping.snapshots import State, take


class Found(NamedTuple):
    """The batch that a failure is traced to.

    Attributes:
        batch: None where none was held.
        before: The state right ahead of its step; None where that is the one which the
            search began with, or where no step failed again.
    """

    batch: Any
    before: State | None = None


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

    def failing(self, batches: Sequence[Any]) -> Found:
        """Returns the first batch of which the step fails.

        Where no step fails again, it is the first one with NaN or inf in it, or else
        the last. The model, which has the state from which they were trained, is left
        in another one.
        """
        before: State | None = None
        with replaced(self._model, steps_per_execution=1):
            if self._step is None:
                self._step = around_training.on_batch(self._model)
            for number, batch in enumerate(batches):
                before = take(self._model, into=before)
                try:
                    logs = failures.plain(self._step(batch))
                except Exception as error:
                    if failures.of_error(error) is None:
                        break  # it fails otherwise here: nothing can be said
                    return Found(batch, before if number else None)
                if self._has_failed(logs):
                    return Found(batch, before if number else None)
        bad = [batch for batch in batches if holds_nonfinite(batch)]
        return Found([*bad, *batches[-1:], None][0])

    def _has_failed(self, logs: dict[str, Any]) -> bool:
        signs = (
            failures.of_logs(logs, ignored=self._ignored),
            failures.of_weights(self._model),
            failures.of_scale(self._model),
        )
        return any(sign is not None for sign in signs)
