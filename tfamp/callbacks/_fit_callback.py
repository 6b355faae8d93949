"""What callbacks have in common: a part in `fit`, and its batches."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import Function, Patch, PatchSet, wrapper
from tfamp.loss_scale.fit_hooks import FIT_HOOKS

Logs = dict[str, Any] | None
# Older progress bars average over an epoch what batches log, counters too.
BAR_AVERAGES = not hasattr(keras.utils.Progbar(1, verbose=0), "stateless_metrics")


class Quiet(str):
    """The name of a figure that logs hold and progress bars leave out."""


@wrapper
def _wrap_end(original: Function, self: Any, epoch: int, logs: Logs = None) -> Any:
    shown = {k: v for k, v in (logs or {}).items() if not isinstance(k, Quiet)}
    return original(self, epoch, shown)


_BAR = PatchSet([Patch(keras.callbacks.ProgbarLogger, "on_epoch_end", _wrap_end)])


class FitCallback(keras.callbacks.Callback):
    """A callback that joins `fit` when training begins and is told how that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: tuple[str, ...] = ()
        self._member: around_training.Member | None = None
        FIT_HOOKS.install()
        _BAR.install()

    def on_train_end(self, logs: Logs = None) -> None:
        """Leaves `fit`: gives the training function back and closes what is open."""
        if self._member is not None:
            self._member.leave()

    def _join(self, **part: Any) -> bool:
        """Takes part in `fit`, as `around_training.join`; whether it has its place."""
        if self._member is not None:
            self._member.leave()
        self._member = around_training.join(self.model, self._end, **part)
        if part and not self._member.has_place:
            kind = type(self).__name__
            self._note(f"A second {kind} in the same `fit` does nothing: use one.")
        return self._member.has_place

    def _end(self, error: BaseException | None) -> None:
        self._member = None
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Lets go of what was opened, after the error that ended `fit` if one did."""

    def _note(self, line: str, level: int = logging.WARNING) -> None:
        """Logs a line once, and lists it in `notes`."""
        if line not in self.notes:
            self.notes = (*self.notes, line)
            logging.log(level, "%s", line)


class Draws:
    """An iterator over what a function draws, for one call of a training function.

    Keras draws from it in Python, ahead of each step, where batches can be timed and
    kept; the first at once, so that the end of the data shows ahead of the step.
    """

    def __init__(self, draw: Callable[[], Any], source: Any) -> None:
        self._draw, self._ahead = draw, [draw()]
        if isinstance(source, (tf.data.Iterator, Draws)):
            self.element_spec = getattr(source, "element_spec", None)

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next batch."""
        return self._ahead.pop() if self._ahead else self._draw()


def can_draw(model: keras.Model) -> bool:
    """Returns whether a model's training function takes any iterator."""
    is_own = type(model).make_train_function is not keras.Model.make_train_function
    return not is_own and not has_workers(model)


def has_workers(model: keras.Model) -> bool:
    """Returns whether a model trains on several workers."""
    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(model.distribute_strategy, kind)
