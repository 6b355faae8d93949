"""What the loss scale and recovery need of an optimizer's insides, and of XLA.

Relies on: TensorFlow optimizers reducing gradients in
`_all_reduce_sum_gradients` and clipping them in `_clip_gradients`, both looked
up on the instance; every write of an optimizer going through the `assign` and
`scatter` methods of TensorFlow's resource variables; Keras naming a class in
saved files by a table of its public names; `_walk_saveable` visiting the
attributes of an optimizer that are saveables themselves; `_trainable_variables`,
`_var_key`, `_iterations`, `_learning_rate` and `_distribution_strategy` of an
optimizer.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.saving.keras_saveable import KerasSaveable
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from tfamp.keras_hooks.patches import HookError, Patch

# Writes that a mask can hold back, and those it cannot.
_MASKED = ("assign", "assign_add", "assign_sub")
_MASKED_SPARSE = ("scatter_add", "scatter_sub", "scatter_update")
_UNMASKED = (
    "scatter_max scatter_min scatter_mul scatter_div batch_scatter_update "
    "scatter_nd_add scatter_nd_sub scatter_nd_update scatter_nd_max scatter_nd_min"
).split()


def in_xla() -> bool:
    """Returns whether a function is being traced for compilation by XLA."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables themselves in `optimizer`."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, list | tuple) else [optimizer]


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def key_of(optimizer: Any, variable: Any) -> Any:
    """Returns what an optimizer tells its variables apart by."""
    return optimizer._var_key(variable)


def strategy_of(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def call_counter(optimizer: Any) -> Any:
    """Returns the variable that counts calls of `apply`, microbatches among them."""
    return optimizer._iterations


def rate_or_schedule(optimizer: Any) -> Any:
    """Returns what a learning rate was set to; the getter gives the present rate."""
    return optimizer._learning_rate


@contextlib.contextmanager
def on_reduced_gradients(optimizer: Any, *, clips: bool) -> Iterator[None]:
    """Makes `optimizer.apply` take gradients that are reduced over replicas.

    Args:
        optimizer: The optimizer whose `apply` is called inside the block.
        clips: Whether it clips the gradients itself.
    """
    changed = []
    try:
        for leaf in leaves(optimizer):
            own = vars(leaf)
            if not hasattr(leaf, "_all_reduce_sum_gradients"):
                raise HookError(
                    f"Found no `_all_reduce_sum_gradients` in {leaf!r}; tfamp relies "
                    "on it. Wrap an optimizer of `keras.optimizers`."
                )
            own["_all_reduce_sum_gradients"] = list
            changed.append((own, "_all_reduce_sum_gradients"))
            if not clips:
                own["_clip_gradients"] = list
                changed.append((own, "_clip_gradients"))
        yield
    finally:
        for own, name in changed:
            own.pop(name, None)


@contextlib.contextmanager
def writes_only_if(condition: tf.Tensor) -> Iterator[None]:
    """Lets what is written to variables inside the block count only on a condition.

    A write becomes one of the value that is there where `condition` is false, to
    the bit. Blocks nest. XLA copies whole variables around a conditional; this
    costs it a select that fuses into the update.

    Args:
        condition: A boolean scalar.
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
    write does is decided by the thread, or the graph, that it happens in. Threads
    that train, load or count beside one that traces are not touched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._around: dict[tuple[str, int], list[_Replace]] = {}
        self._originals: list[tuple[type, str, Any]] = []

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
                    self._remove()

    def _install(self) -> None:
        for cls in _variable_classes(BaseResourceVariable):
            for name in (*_MASKED, *_MASKED_SPARSE, *_UNMASKED):
                if name in vars(cls):
                    original = vars(cls)[name]
                    self._originals.append((cls, name, original))
                    setattr(cls, name, self._write(original, name))

    def _remove(self) -> None:
        while self._originals:
            cls, name, original = self._originals.pop()
            setattr(cls, name, original)

    def _write(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def write(variable: Any, *args: Any, **kwargs: Any) -> Any:
            function = original
            for replace in tuple(self._around.get(_place(), ())):
                function = replace(function, name)
            return function(variable, *args, **kwargs)

        return write


def _place() -> tuple[str, int]:
    """Returns the function that is being traced, outermost, or else the thread.

    Replicas trace one function in threads of their own. What `init_scope` runs while
    a function is traced belongs to the thread, where no mask of the graph is known.
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


class SavedBeside(KerasSaveable):
    """Variables that a saved file holds beside those of stock Keras.

    An attribute of the optimizer: stock Keras passes over what it does not know
    when it loads the file.

    Args:
        name: Name of the group in the file.
        variables: Gives the variables by the name they are saved under.
        take: Takes the values of a file, by name.
    """

    def __init__(
        self,
        name: str,
        variables: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        self.name = name
        self._own_variables = variables
        self._take = take

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Puts every variable into `store`, by name."""
        for name, variable in self._own_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Hands all that `store` has to the optimizer."""
        self._take({name: store[name][()] for name in store.keys()})


def save_under_stock_name(cls: type, stock: type) -> None:
    """Lets saved files name `stock` where they mean `cls`, a subclass of it."""
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = api_export.REGISTERED_OBJS_TO_NAMES[
        stock
    ]


def from_config_patch(is_ours: Callable[[dict[str, Any]], bool], ours: Any) -> Patch:
    """Returns the patch that turns our configurations into our class.

    Args:
        is_ours: Tells from a configuration whether our class wrote it.
        ours: That class.
    """

    def wrap(original: Callable[..., Any]) -> Any:
        def from_config(
            cls: type, config: dict[str, Any], custom_objects: Any = None
        ) -> Any:
            if cls is keras.optimizers.LossScaleOptimizer and is_ours(config):
                return ours.from_config(config, custom_objects)
            return original.__func__(cls, config, custom_objects)  # type: ignore[attr-defined]

        return classmethod(from_config)

    return Patch(keras.optimizers.LossScaleOptimizer, "from_config", wrap)
