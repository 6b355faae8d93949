"""Tells recorders when `fit` begins, calls its training function, and fails.

A callback is not told of an exception, and another callback may stand between it and
the training function. So for as long as a recorder lives `keras.Model.fit` has a frame
around it, which finds what lies beneath anew in each call; and for the length of a
`fit` with a recorder in it, the training function is replaced by one that asks it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfamp._patch import HeldPatches, Patch, like, replaced
from tfamp.bundles.record import Cause

# What ends `fit` without being a failure of a step.
HARMLESS = (StopIteration, tf.errors.OutOfRangeError)
# Recorders of each `fit` that runs now.
_RUNNING: "weakref.WeakKeyDictionary[keras.Model, list[Recorder]]" = (
    weakref.WeakKeyDictionary()
)


class Recorder(Protocol):
    """What is told of a `fit`."""

    def attach(self) -> None:
        """Is told that the training function is there."""

    def on_error(self, error: Exception) -> None:
        """Is told that `fit` ends in an error."""

    def on_failure(self, cause: Cause, message: str) -> None:
        """Is told that the last call failed, as another callback saw."""

    def detach(self) -> None:
        """Is told that `fit` is over, in one way or another."""


def register(model: keras.Model, recorder: Recorder) -> bool:
    """Has a recorder told of the `fit` of a model that runs now.

    Returns:
        Whether one runs that it was not told of before.
    """
    recorders = _RUNNING.get(model)
    if recorders is None or any(each is recorder for each in recorders):
        return False
    recorders.append(recorder)
    return True


def tell_recorders(model: keras.Model, cause: Cause, message: str) -> None:
    """Tells the recorders of a model's `fit` of a failure that was seen elsewhere."""
    for recorder in _RUNNING.get(model, ()):
        recorder.on_failure(cause, message)


def _around_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        # Not `original`: what lies beneath may have been replaced since.
        inner = super(keras.Model, self).fit
        if self in _RUNNING:  # a `fit` inside of `fit`
            return inner(*args, **kwargs)
        with _watched(self):
            return inner(*args, **kwargs)

    return fit


@contextlib.contextmanager
def _watched(model: keras.Model) -> Iterator[None]:
    recorders: list[Recorder] = []
    _RUNNING[model] = recorders
    original = model.make_train_function

    @like(original)
    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        # Before any callback replaces the function in its turn.
        for recorder in recorders:
            recorder.attach()
        return made

    try:
        with replaced(model, make_train_function=make_train_function):
            yield
    except Exception as error:
        for recorder in recorders:
            recorder.on_error(error)
        raise
    finally:
        del _RUNNING[model]
        for recorder in recorders:
            recorder.detach()


FIT_FRAME = HeldPatches([Patch(keras.Model, "fit", _around_fit)])
