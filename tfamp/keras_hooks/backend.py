"""The parts of Keras's backend that hooks use, wherever its versions keep them.

Relies on: `backend.ops`, from Keras 3.16 on, holding what `backend` held before; the
TensorFlow backend's trainer being a class on top of the one that all backends share;
`set_random_seed` keeping the seed and its generator under two names, and TensorFlow's
context what it draws seeds of operations from, and its global generator in a module;
`Variable.value` going through `_maybe_autocast`, `_value` holding the TensorFlow
variable, `_initialize` making it anew, and `_dtype` naming its dtype.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend import common
from keras.src.backend.common import global_state, masking, symbolic_scope
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers import trainer as shared_trainer
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops

from tfamp.keras_hooks.patches import Function, Patch, wrapper

_SEED, _GENERATOR = "global_random_seed", "global_seed_generator"

# Hooks on operations replace attributes of its modules.
operations = getattr(backend, "ops", backend)

HALF = (tf.float16, tf.bfloat16)

cast = operations.cast
convert_to_tensor = operations.convert_to_tensor
random = backend.random

AutocastScope = common.AutocastScope
get_autocast_scope = common.get_autocast_scope
StatelessScope = backend.StatelessScope
in_stateless_scope = backend.in_stateless_scope
in_symbolic_scope = symbolic_scope.in_symbolic_scope

get_keras_mask = masking.get_keras_mask
set_keras_mask = masking.set_keras_mask
is_float_dtype = common.is_float_dtype
standardize_dtype = common.standardize_dtype

# Keras 3.16 names it as that of every backend, and the shared one otherwise.
TensorFlowTrainer = (
    getattr(tensorflow_trainer, "TensorFlowTrainer", None) or tensorflow_trainer.Trainer
)
# The class of Keras's variables that assigns, whatever it is called.
KerasVariable = next(c for c in keras.Variable.__mro__ if "assign" in vars(c))
SharedTrainer = getattr(shared_trainer, "BaseTrainer", None) or shared_trainer.Trainer


@contextlib.contextmanager
def global_attributes(**values: Any) -> Iterator[None]:
    """Sets attributes of this thread's global state inside the block."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    try:
        for name, value in values.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


@contextlib.contextmanager
def numbers_of_tensors_kept() -> Iterator[None]:
    """Has graph tensors after the block be named as if it had made none."""
    known = global_state.get_global_attribute("object_name_uids") or {}
    before = known.get("keras_tensor")
    try:
        yield
    finally:
        made = global_state.get_global_attribute("object_name_uids") or {}
        made.pop("keras_tensor", None)
        if before is not None:
            made["keras_tensor"] = before


@contextlib.contextmanager
def global_seeds() -> Iterator[None]:
    """Puts the global seeds of Keras and TensorFlow back to what they were before."""
    of_tensorflow: Any = context.context()
    # Where no seed was ever set, there is nothing that seeds are drawn from.
    seed, drawn_from = of_tensorflow._seed, getattr(of_tensorflow, "_rng", None)
    place = None if drawn_from is None else drawn_from.getstate()
    generator = global_state.get_global_attribute(_GENERATOR)
    state = None if generator is None else np.array(generator.state)
    own_seed = global_state.get_global_attribute(_SEED)
    try:
        with global_attributes(**{_SEED: own_seed, _GENERATOR: generator}):
            yield
    finally:
        if state is not None:
            generator.state.assign(state)
        if getattr(of_tensorflow, "_rng", None) is not drawn_from:
            # Kernels that drew by the other seed would go on from there.
            of_tensorflow.clear_kernel_cache()
        of_tensorflow._seed, of_tensorflow._rng = seed, drawn_from
        if drawn_from is not None:
            drawn_from.setstate(place)


def global_generator() -> Any:
    """Returns TensorFlow's global random generator, None before its first use."""
    return stateful_random_ops.global_generator


def outermost_graph() -> Any:
    """Returns the function that is being traced, outermost; None in eager code."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        if not graph.outer_graph.building_function:
            break
        graph = graph.outer_graph
    return graph


@contextlib.contextmanager
def noting_reads() -> Iterator[dict[int, set[str]]]:
    """Notes, for each weight by its `id`, the dtypes that it is read in."""
    found: dict[int, set[str]] = {}

    @wrapper
    def wrap(original: Function, self: Any, value: Any) -> Any:
        given = original(self, value)
        dtype = standardize_dtype(given.dtype)
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
