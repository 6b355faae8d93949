"""How variables are read and stored: the dtypes of both.

Relies on: `Variable.value` of Keras going through `_maybe_autocast`; `_value`
holding the TensorFlow variable and `_initialize` making it anew; `_dtype` naming its
dtype; the attribute "current_call_ctx" being set while a layer is called.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.patches import Function, Patch, PatchSet, wrapper


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


def _wrap_read(note: Callable[[Any, str], None]) -> Callable[..., Any]:
    """Returns a wrapper that calls `note` with a weight and the dtype it is read in."""

    @wrapper
    def wrap(original: Function, self: Any, value: Any) -> Any:
        given = original(self, value)
        note(self, backend.standardize_dtype(given.dtype))
        return given

    return wrap


@contextlib.contextmanager
def noting_reads() -> Iterator[dict[int, set[str]]]:
    """Notes, for each weight by its `id`, the dtypes that it is read in."""
    found: dict[int, set[str]] = {}

    def note(variable: Any, dtype: str) -> None:
        found.setdefault(id(variable), set()).add(dtype)

    with Patch(keras.Variable, "_maybe_autocast", _wrap_read(note)).standing():
        yield found


class _Reads:
    """The dtypes in which layers have read a weight, in the function traced last."""

    def __init__(self, variable: Any, forget: Callable[[Any], Any]) -> None:
        self.variable = weakref.ref(variable, forget)
        self.graph: Any = None
        self.dtypes: set[str] = set()

    def add(self, dtype: str) -> None:
        graph = outermost_graph()
        if graph is not (None if self.graph is None else self.graph()):
            self.dtypes = set()
            self.graph = None if graph is None else weakref.ref(graph)
        self.dtypes.add(dtype)


_READS: dict[int, _Reads] = {}


def dtypes_read(variable: Any) -> frozenset[str]:
    """Returns the dtypes in which layers read a weight, as far as `READ_HOOKS` saw.

    Those of the function that was traced last, or of eager code.
    """
    reads = _READS.get(id(variable))
    return frozenset() if reads is None else frozenset(reads.dtypes)


def _note_in_call(variable: Any, dtype: str) -> None:
    # What a regularizer or an optimizer reads is no computation of a layer.
    if global_state.get_global_attribute("current_call_ctx") is not None:
        key = id(variable)
        if key not in _READS:
            _READS[key] = _Reads(variable, lambda _: _READS.pop(key, None))
        _READS[key].add(dtype)


READ_HOOKS = PatchSet(
    [Patch(keras.Variable, "_maybe_autocast", _wrap_read(_note_in_call))]
)


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
