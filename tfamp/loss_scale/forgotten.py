"""Notices a training loop that applies gradients of a loss it never scaled."""

import sys
import warnings
import weakref
from typing import Any

import tensorflow as tf

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10
_MAX_FRAMES = 12
_LIBRARIES = ("tfamp", "tensorflow", "keras", "contextlib", "threading")

_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where the loss was never scaled and its gradients are applied."""
    if optimizer.has_scaled_loss or _has_no_scale(optimizer):
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    if count > _EAGER_STEPS:
        return
    is_sure = not tf.executing_eagerly() or _is_under_a_tape()
    if not is_sure and count < _EAGER_STEPS:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but the "
        "loss was never multiplied by it: updates are too small by that factor. Put "
        "`loss = optimizer.scale_loss(loss)` before the gradients are computed, in "
        "`train_step` as `self.optimizer.scale_loss(loss)`.",
        UserWarning,
        stacklevel=_level_of_user(),
    )


def _has_no_scale(optimizer: Any) -> bool:
    return not optimizer.dynamic and optimizer.initial_scale == 1


def _level_of_user() -> int:
    """Returns the stack level of the first frame outside the libraries."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if module not in _LIBRARIES:
            return level
        frame, level = frame.f_back, level + 1
    return 2


def _is_under_a_tape() -> bool:
    """Returns whether a caller holds a gradient tape among its variables."""
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if any(isinstance(v, tf.GradientTape) for v in frame.f_locals.values()):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
