"""The parts of a value of any kind."""

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.fingerprints import functions, graphs, layers
from tfamp.data.fingerprints.classes import (
    class_parts,
    module_of,
    name_of,
    object_parts,
)
from tfamp.data.fingerprints.files import files_named
from tfamp.data.fingerprints.packages import is_installed
from tfamp.data.fingerprints.walk import Parts, Unordered, Unseen

_CONTAINERS = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_ARRAYS = (np.ndarray, np.memmap)


def parts_of(value: Any) -> Parts:
    """Returns the parts of a value, the name of its kind first."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return functions.function_parts(value)
    if isinstance(value, types.CodeType):
        return functions.code_parts(value)
    if isinstance(value, types.ModuleType):
        return functions.module_parts(value)
    if isinstance(value, types.MethodType):
        return iter(("method", value.__self__, value.__func__))
    if isinstance(value, type):
        return class_parts(value)
    if kind in _ARRAYS or isinstance(value, np.generic):
        return _array_parts(np.asarray(value))
    if isinstance(value, tf.data.Dataset):
        return graphs.dataset_parts(value)
    if isinstance(value, (tf.Tensor, *layers.VARIABLES)):
        return _tensor_parts(value)
    if isinstance(value, tf.__internal__.CompositeTensor):
        return _composite_parts(value)
    if isinstance(value, layers.TABLES):
        return layers.table_parts(value)
    if isinstance(value, keras.layers.Layer):
        return layers.layer_parts(value)
    if hasattr(value, "python_function"):  # a tf.function
        return _traced_parts(value)
    if hasattr(value, "captured_inputs") and hasattr(value, "graph"):
        return graphs.concrete_parts(value)
    if isinstance(value, np.ufunc):
        return _ufunc_parts(value)
    if is_installed(module_of(kind)):
        return _installed_parts(value)
    return object_parts(value)


def _installed_parts(value: Any) -> Parts:
    """Returns the parts of an object whose class is not the user's."""
    if isinstance(value, Mapping):
        return _mapping_parts(value)
    if isinstance(value, _SETS):
        return iter(("set", Unordered(list(value))))
    if isinstance(value, _CONTAINERS):
        # TensorFlow and Keras put lists of their own in the place of plain ones.
        name = next(one.__name__ for one in _CONTAINERS if isinstance(value, one))
        return iter((name, len(value), *value))
    if module_of(type(value)).startswith("tfamp.") and dataclasses.is_dataclass(value):
        return _record_parts(value)
    return object_parts(value)


def _mapping_parts(value: Mapping[Any, Any]) -> Parts:
    yield "mapping"
    yield getattr(value, "default_factory", None)
    yield Unordered([(key, value[key]) for key in list(value)])


def _record_parts(value: Any) -> Parts:
    """Yields a record of tfamp's by the fields that tell it from others."""
    yield "record"
    yield name_of(type(value))
    for field in dataclasses.fields(value):
        if field.compare:
            yield from (field.name, getattr(value, field.name))


def _array_parts(array: np.ndarray) -> Parts:
    yield "array"
    yield f"{array.dtype} {array.shape}"
    if array.dtype.hasobject:
        items = array.ravel().tolist()
        yield from items
        texts = [item for item in items if isinstance(item, (str, bytes))]
    else:
        yield np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
        texts = array.ravel().tolist() if array.dtype.kind in "SU" else []
    named = files_named(texts)
    if named.identities:
        yield named


def _tensor_parts(value: Any) -> Parts:
    yield "tensor"
    dtype = getattr(value, "dtype", None)
    if dtype in (tf.resource, tf.variant):
        yield Unseen(f"a tensor of {dtype.name}")
        return
    try:
        array = np.asarray(value)
    except (NotImplementedError, TypeError, ValueError, tf.errors.OpError):
        yield Unseen("a tensor without a value")
        return
    yield array


def _composite_parts(value: Any) -> Parts:
    """Yields a ragged or sparse tensor by its components."""
    yield "tensors"
    yield tf.type_spec_from_value(value)
    yield tf.nest.flatten(value, expand_composites=True)


def _traced_parts(value: Any) -> Parts:
    yield "tf.function"
    yield value.python_function
    yield getattr(value, "input_signature", None)


def _ufunc_parts(value: np.ufunc) -> Parts:
    yield "ufunc"
    yield value.__name__
    if value.__name__.endswith("(vectorized)"):
        yield Unseen(f"the function that np.frompyfunc made {value.__name__!r} of")
