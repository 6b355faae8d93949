"""Hooks on the operations that half precision spoils wherever they are written.

Relies on: layers, activation strings and `keras.ops` all reaching the
TensorFlow backend's functions as attributes of its modules, and raw calls being
attributes of TensorFlow's; losses recovering logits from the `_keras_logits` attribute
of a prediction.
"""

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.backend import operations
from tfamp.keras_hooks.layer_record import Kind, LayerRecord, innermost
from tfamp.keras_hooks.patches import Patch, like

CAREFUL = "_tfamp_careful"
_HALF = (tf.float16, tf.bfloat16)
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
    """Returns the patches on softmax, log-softmax, sigmoid and running sums.

    Inside the call of a managed layer each of them computes in float32 on a
    half-precision input and returns the input's dtype. In the layer that makes
    a model's output the result stays float32.

    Args:
        has_float32_operations: Whether the layer being called asked for this.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        first = next(iter(inspect.signature(original).parameters))

        @like(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            record = innermost()
            x = args[0] if args else kwargs.get(first)
            if (
                record is None
                or not isinstance(x, tf.Tensor)
                or x.dtype not in _HALF
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
                setattr(output, CAREFUL, True)
            return output

        return operation

    return [Patch(module, name, wrap) for module, name in _OPERATIONS]
