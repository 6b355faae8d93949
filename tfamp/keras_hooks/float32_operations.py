"""Hooks that have float32 used for what half precision spoils wherever it is written.

Softmax and sigmoid, norms, variances, means and running sums, what losses are given and
how they are added up, and what activity regularizers see.

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
from keras.src import ops as keras_operations
from keras.src import tree

from tfamp.keras_hooks import backend, calls, structure
from tfamp.keras_hooks.backend import HALF, operations
from tfamp.keras_hooks.layers import CALLS, Kind, LayerRecord, record_of
from tfamp.keras_hooks.patches import Function, Patch, like, wrapper

# Marks a result of a managed layer in half precision that has its logits.
_CAREFUL = "_tfamp_careful"
# Where Keras's operations end, by module of its backend.
_OF_KERAS = {
    operations.nn: ("softmax", "log_softmax", "sigmoid", "moments"),
    operations.math: ("logsumexp", "segment_sum"),
    operations.linalg: ("norm",),
    operations.numpy: (
        *("cumsum", "cumprod", "mean", "average", "var", "std", "corrcoef"),
        *("nanmean", "nanvar", "nanstd", "logaddexp"),
    ),
    keras_operations.nn: ("_normalize",),
}
# TensorFlow's own, under each name that it gives them.
_OF_TENSORFLOW = {
    tf: ("sigmoid", "reduce_logsumexp", "cumsum", "norm", "reduce_mean"),
    tf.nn: (
        *("softmax", "log_softmax", "sigmoid", "l2_normalize", "moments"),
        "weighted_moments",
    ),
    tf.math: (
        *("softmax", "log_softmax", "sigmoid", "reduce_logsumexp", "cumsum"),
        *("l2_normalize", "reduce_mean", "reduce_variance", "reduce_std"),
        "reduce_euclidean_norm",
    ),
    tf.linalg: ("l2_normalize", "norm", "normalize"),
}
_OPERATIONS = tuple(
    (module, name)
    for modules in (_OF_KERAS, _OF_TENSORFLOW)
    for module, names in modules.items()
    for name in names
    if hasattr(module, name)  # not in every version of Keras
)


def patches(has_float32_operations: Callable[[LayerRecord], bool]) -> list[Patch]:
    """Returns the patches on operations, losses and activity regularizers.

    Inside the call of a managed layer each operation computes in float32 on
    half-precision inputs and returns the first input's dtype. In the layer that makes
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
            wide_args, wide_kwargs = tree.map_structure(_widened, (args, kwargs))
            result = original(*wide_args, **wide_kwargs)
            if record.kind is Kind.WIDE_OUTPUT:
                output = result
            else:
                output = tree.map_structure(
                    lambda y: tf.cast(y, x.dtype) if _is_float32(y) else y, result
                )
            if hasattr(result, "_keras_logits"):
                wide = wide_args[0] if args else wide_kwargs[first]
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


def _is_float32(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and x.dtype == tf.float32


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
