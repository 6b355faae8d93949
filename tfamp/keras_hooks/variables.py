"""How variables are read and stored: the dtypes of both.

Relies on: `Variable.value` of Keras going through `_maybe_autocast`; `_value`
holding the TensorFlow variable and `_initialize` making it anew; `_dtype` naming its
dtype.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.patches import Function, Patch, wrapper


def outermost_graph() -> Any:
    """Returns the function that is being traced, outermost; None in eager code."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        outer = graph.outer_graph
        if not outer.building_function:
            break
        graph = outer
    return graph


@contextlib.contextmanager
def noting_reads() -> Iterator[dict[int, set[str]]]:
    """Notes, for each weight by its `id`, the dtypes that it is read in."""
    found: dict[int, set[str]] = {}

    @wrapper
    def wrap(original: Function, self: Any, value: Any) -> Any:
        given = original(self, value)
        dtype = backend.standardize_dtype(given.dtype)
        found.setdefault(id(self), set()).add(dtype)
        return given

    with Patch(keras.Variable, "_maybe_autocast", wrap).standing():
        yield found


def stored(variable: Any) -> Any:
    """Returns the variable of TensorFlow that holds the value of one of Keras's."""
    value = getattr(variable, "_value", None)
    is_keras = isinstance(variable, keras.Variable) and value is not None
    return value if is_keras else variable


def store_in(variable: Any, dtype: str) -> None:
    """Stores a weight in another float dtype; call it in the scope of its strategy."""
    value = tf.cast(tf.convert_to_tensor(variable._value), dtype)
    variable._dtype = dtype
    variable._initialize(value)
