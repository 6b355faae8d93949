"""Notices gradients that have no loss scale, or of which it is not known."""

import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import CALLS, record_of

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10
_LIBRARIES = ("tfamp", "tensorflow", "keras", "contextlib", "threading")

_met: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    if optimizer.has_scaled_loss or _has_no_scale(optimizer):
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    is_sure = not tf.executing_eagerly() or count == _EAGER_STEPS
    if count > _EAGER_STEPS or not is_sure:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed.",
        UserWarning,
        stacklevel=_level_of_user(),
    )


def float16_layer_of(sources: Sequence[Any]) -> Any:
    """Returns the layer called last here of which weights in float16 are asked for.

    Args:
        sources: What a tape is asked for.
    """
    # A variable of TensorFlow has a method of the name by which Keras's hold theirs.
    values = [getattr(source, "value", source) for source in sources]
    pairs = zip(values, sources, strict=True)
    asked = {id(source if callable(value) else value) for value, source in pairs}
    for reference in reversed(CALLS.float16_layers):
        layer = reference()
        if layer is not None and record_of(layer) is not None:
            low = [
                weight
                for _, part, _ in structure.walk(layer)
                if part.compute_dtype == "float16"
                for weight in structure.own_weights(part)
            ]
            if not asked.isdisjoint(id(weight.value) for weight in low):
                return layer
    return None


def warn_of_no_scale(layer: Any) -> None:
    """Warns once that a float16 layer's gradients are computed with no loss scale.

    Not of the first eager step, by which an optimizer made ahead of tfamp is found.

    Args:
        layer: The layer, whose gradients no optimizer is known to apply.
    """
    if layer in _warned:
        return
    if tf.executing_eagerly() and layer not in _met:
        _met.add(layer)
        return
    _warned.add(layer)
    warnings.warn(
        f"{type(layer).__name__} {layer.name!r} computes in float16, and its gradients "
        "are computed with no loss scale: those below 6e-8 are 0. Make the optimizer "
        "after `tfamp.enable`, or apply them by `tfamp.LossScaleOptimizer(optimizer)`, "
        "made ahead of the first step.",
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
