"""How variables are written and read: masks over writes, dtypes of reads and storage.

Relies on: every write going through the `assign` and `scatter` methods of TensorFlow's
resource variables; `Variable.value` of Keras going through `_maybe_autocast`; `_value`
holding the TensorFlow variable and `_initialize` making it anew; `_dtype` naming its
dtype; the attribute "current_call_ctx" being set while a layer is called.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.patches import Function, HeldPatches, Patch, PatchSet, wrapper

# Writes that a mask can hold back, and those it cannot.
_MASKED = ("assign", "assign_add", "assign_sub")
_MASKED_SPARSE = ("scatter_add", "scatter_sub", "scatter_update")
_UNMASKED = (
    "scatter_max scatter_min scatter_mul scatter_div batch_scatter_update "
    "scatter_nd_add scatter_nd_sub scatter_nd_update scatter_nd_max scatter_nd_min"
).split()


@contextlib.contextmanager
def writes_only_if(condition: tf.Tensor) -> Iterator[None]:
    """Lets what is written to variables inside the block count only on a condition.

    A write becomes one of the value that is there where `condition`, a boolean scalar,
    is false, to the bit. Blocks nest. XLA copies whole variables around a conditional;
    this costs it a select that fuses into the update.
    """
    is_inside = [False]
    with _WRITES.replaced(
        lambda original, name: _masked(original, name, condition, is_inside)
    ):
        yield


@contextlib.contextmanager
def variables_written() -> Iterator[set[int]]:
    """Collects the ids of the variables that are written inside the block."""
    written: set[int] = set()
    with _WRITES.replaced(lambda original, name: _noted(original, written)):
        yield written


_Replace = Callable[[Callable[..., Any], str], Callable[..., Any]]


class _Writes:
    """What stands around writes of variables, for each thread and graph of its own.

    The methods of TensorFlow's classes are replaced while any block is open; what a
    write does is decided by the thread, or the graph, that it happens in. Threads that
    train, load or count beside one that traces are not touched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._around: dict[tuple[str, int], list[_Replace]] = {}
        self._patches = PatchSet([])

    @contextlib.contextmanager
    def replaced(self, replace: _Replace) -> Iterator[None]:
        """Puts `replace(original, name)` in place of a write, for this place only."""
        place = _place()
        with self._lock:
            if not self._around:
                self._install()
            self._around.setdefault(place, []).append(replace)
        try:
            yield
        finally:
            with self._lock:
                self._around[place].remove(replace)
                if not self._around[place]:
                    del self._around[place]
                if not self._around:
                    self._patches.remove()

    def _install(self) -> None:
        self._patches = PatchSet(
            Patch(cls, name, functools.partial(self._write, name))
            for cls in _variable_classes(BaseResourceVariable)
            for name in (*_MASKED, *_MASKED_SPARSE, *_UNMASKED)
            if name in vars(cls)
        )
        self._patches.install()

    def _write(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def write(variable: Any, *args: Any, **kwargs: Any) -> Any:
            function = original
            for replace in tuple(self._around.get(_place(), ())):
                function = replace(function, name)
            return function(variable, *args, **kwargs)

        return write


def _place() -> tuple[str, int]:
    """Returns the function that is being traced, outermost, or else the thread.

    Replicas trace one function in threads of their own. What `init_scope` runs while a
    function is traced belongs to the thread, where no mask of the graph is known.
    """
    graph = outermost_graph()
    if graph is None:
        return "thread", threading.get_ident()
    return "graph", id(graph)


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


_WRITES = _Writes()


def _noted(original: Callable[..., Any], written: set[int]) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        written.add(id(self))
        return original(self, *args, **kwargs)

    return write


def _variable_classes(cls: Any) -> Iterator[type]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _variable_classes(subclass)


def _masked(
    original: Callable[..., Any], name: str, condition: tf.Tensor, is_inside: list[bool]
) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside[0]:  # a method of a subclass that calls that of its base
            return original(self, *args, **kwargs)
        if name in _UNMASKED:
            raise RuntimeError(
                f"An optimizer writes by `{name}` under XLA, where a step with "
                "non-finite gradients could not be held back. Compile the step with "
                "`jit_compile=False`."
            )
        value, *rest = args
        is_inside[0] = True
        try:
            return original(self, _held(self, name, value, condition), *rest, **kwargs)
        finally:
            is_inside[0] = False

    return write


def _held(variable: Any, name: str, value: Any, condition: tf.Tensor) -> Any:
    """Returns what to write so that nothing changes where `condition` is false."""
    if name in _MASKED_SPARSE:
        indices = value.indices
        if name == "scatter_update":
            neutral = tf.gather(variable.read_value(), indices)
        else:
            neutral = _neutral(name.removeprefix("scatter_"), variable.dtype)
        values = tf.where(condition, tf.cast(value.values, variable.dtype), neutral)
        return tf.IndexedSlices(values, indices, value.dense_shape)
    value = tf.convert_to_tensor(value, dtype=variable.dtype)
    if name == "assign":
        return tf.where(condition, value, variable.read_value())
    return tf.where(
        condition, value, _neutral(name.removeprefix("assign_"), value.dtype)
    )


def _neutral(operation: str, dtype: tf.DType) -> tf.Tensor:
    # -0.0 + 0.0 is 0.0, another bit pattern; adding -0.0 changes nothing.
    zero = -0.0 if operation == "add" and dtype.is_floating else 0
    return tf.constant(zero, dtype)


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


READ_HOOKS = HeldPatches(
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
