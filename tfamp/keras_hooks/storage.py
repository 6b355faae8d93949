"""The dtype that a weight is stored in, and those that it is read in.

Relies on: `Variable.value` going through `_maybe_autocast`; `_value` holding the
TensorFlow variable and `_initialize` making it anew; `_dtype` naming its dtype.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.patches import Patch, like


@contextlib.contextmanager
def noting_reads() -> Iterator[dict[int, set[str]]]:
    """Notes, for each weight by its `id`, the dtypes that it is read in."""
    found: dict[int, set[str]] = {}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def _maybe_autocast(self: Any, value: Any) -> Any:
            given = original(self, value)
            dtype = backend.standardize_dtype(given.dtype)
            found.setdefault(id(self), set()).add(dtype)
            return given

        return _maybe_autocast

    patch = Patch(keras.Variable, "_maybe_autocast", wrap)
    patch.install()
    try:
        yield found
    finally:
        patch.remove()


def store_in(variable: Any, dtype: str) -> None:
    """Stores a weight in another dtype; what it was stored in is let go.

    Args:
        variable: A weight; call it in the scope of its strategy.
        dtype: A float dtype.
    """
    value = tf.cast(tf.convert_to_tensor(variable._value), dtype)
    variable._dtype = dtype
    variable._initialize(value)
