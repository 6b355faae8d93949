"""Hooks that have float32 used for what half precision spoils wherever it is written.

Softmax and sigmoid, running sums, what losses are given and how they are added up, and
what activity regularizers see.

Relies on: layers, activation strings and `keras.ops` all reaching the TensorFlow
backend's functions as attributes of its modules, and raw calls being attributes of
TensorFlow's; losses recovering logits from the `_keras_logits` attribute of a
prediction; `Loss.__call__` casting predictions to its own dtype, whereby the cast
tensor loses those; `Trainer.compute_loss` adding `model.losses` to the main loss, which
must all have one dtype; `Layer.__call__` reading `self.activity_regularizer` while a
call context is open.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree

from tfamp.keras_hooks import backend, calls, structure
from tfamp.keras_hooks.backend import HALF, operations
from tfamp.keras_hooks.layers import CALLS, Kind, LayerRecord, record_of
from tfamp.keras_hooks.patches import Function, Patch, like, wrapper

# Marks a result of a managed layer in half precision that has its logits.
_CAREFUL = "_tfamp_careful"
_OF_BOTH = ("softmax", "log_softmax")
_OF_ALL = ("sigmoid", "reduce_logsumexp", "cumsum")
_OPERATIONS = (
    (operations.nn, "softmax"),
    (operations.nn, "log_softmax"),
    (operations.nn, "sigmoid"),
    (operations.math, "logsumexp"),
    (operations.numpy, "cumsum"),
    (operations.numpy, "cumprod"),
    *((module, name) for module in (tf.nn, tf.math) for name in _OF_BOTH),
    *((module, name) for module in (tf, tf.math) for name in _OF_ALL),
    (tf.nn, "sigmoid"),
)


def patches(has_float32_operations: Callable[[LayerRecord], bool]) -> list[Patch]:
    """Returns the patches on operations, losses and activity regularizers.

    Inside the call of a managed layer each operation computes in float32 on a
    half-precision input and returns the input's dtype. In the layer that makes
    a model's output the result stays float32.

    Args:
        has_float32_operations: Whether the layer being called asked for this.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        first = next(iter(inspect.signature(original).parameters))

        @like(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            record = CALLS.stack[-1] if CALLS.stack else None
            x = args[0] if args else kwargs.get(first)
            if (
                record is None
                or not isinstance(x, tf.Tensor)
                or x.dtype not in HALF
                or not has_float32_operations(record)
            ):
                return original(*args, **kwargs)
            if args:
                args = args[1:]
            else:
                del kwargs[first]
            wide = tf.cast(x, tf.float32)
            result = original(wide, *args, **kwargs)
            output = result
            if record.kind is not Kind.WIDE_OUTPUT and result.dtype == tf.float32:
                output = tf.cast(result, x.dtype)
            if hasattr(result, "_keras_logits"):
                output._keras_logits = x if output.dtype == x.dtype else wide
                setattr(output, _CAREFUL, True)
            return output

        return operation

    return [
        *(Patch(module, name, wrap) for module, name in _OPERATIONS),
        Patch(keras.Loss, "__call__", _wrap_loss),
        Patch(keras.layers.Layer, "add_loss", _wrap_add_loss),
        Patch(
            keras.layers.Layer,
            "activity_regularizer",
            lambda original: _ActivityRegularizer(),
            optional=True,
        ),
    ]


@wrapper
def _wrap_loss(
    original: Function,
    self: keras.Loss,
    y_true: Any,
    y_pred: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Widens predictions that a managed layer made, with their logits and mask."""
    wide = tree.map_structure(_with_wide_logits, y_pred)
    return original(self, y_true, wide, *args, **kwargs)


def _with_wide_logits(x: Any) -> Any:
    if not hasattr(x, _CAREFUL):
        return x
    wide = backend.cast(x, "float32")
    wide._keras_logits = backend.cast(x._keras_logits, "float32")
    return structure.with_mask_of(x, wide)


@wrapper
def _wrap_add_loss(original: Function, self: keras.layers.Layer, loss: Any) -> Any:
    if record_of(self) is not None:
        loss = tree.map_structure(_widened, loss)
    return original(self, loss)


def _widened(x: Any) -> Any:
    is_half = isinstance(x, tf.Tensor) and x.dtype in HALF
    return backend.cast(x, "float32") if is_half else x


class _InFloat32:
    """A regularizer, called on the float32 value of what it is given."""

    def __init__(self, regularizer: Callable[[Any], Any]) -> None:
        self._regularizer = regularizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._regularizer, name)

    def __call__(self, x: Any) -> Any:
        return self._regularizer(backend.cast(x, "float32"))


class _ActivityRegularizer:
    """`Layer.activity_regularizer`, which sees float32 during a managed call.

    Outside a call the plain object is given, so configs are what they were.
    """

    _name = "activity_regularizer"

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            regularizer = vars(layer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if regularizer is None or record_of(layer) is None or not calls.in_call():
            return regularizer
        return _InFloat32(regularizer)

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)[self._name] = value

    def __delete__(self, layer: Any) -> None:
        del vars(layer)[self._name]
