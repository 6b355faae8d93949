"""Finds operations of a layer that TensorFlow cannot run in half precision.

Tracing accepts them, as their definition allows the dtype: `tf.linalg.cholesky` in
float16, `tf.nn.local_response_normalization` or `tf.math.lgamma` in bfloat16. The first
step then fails for want of a kernel. They are looked for where Keras or tfamp traces a
layer for its shapes, since nothing can be taken out of the graph of a step.

Relies on: `Operation.compute_output_spec` calling the backend's function of that name
with the layer's `call`; the registry of kernels in TensorFlow, which names the dtypes
that each kernel is for.
"""

import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from tensorflow.python.framework import kernels

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.layers import CALLS, Kind, LayerRecord, record_of
from tfamp.keras_hooks.patches import Function, Patch, wrapper

_MISSING = "TensorFlow has no kernel that computes {} in {}"
# Operations of calls that were repeated in float32: nothing uses their results.
_abandoned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def patches() -> list[Patch]:
    """Returns the patch on traces for shapes."""
    return [Patch(keras_backend, "compute_output_spec", _wrap)]


@wrapper
def _wrap(original: Function, fn: Any, *args: Any, **kwargs: Any) -> Any:
    layer = getattr(fn, "__self__", None)
    record = record_of(layer) if isinstance(layer, keras.layers.Layer) else None
    if record is None:
        return original(fn, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        return checked(layer, record, lambda: fn(*args, **kwargs))

    return original(call, *args, **kwargs)


def checked(
    layer: keras.layers.Layer, record: LayerRecord, call: Callable[[], Any]
) -> Any:
    """Returns what a call returns; in a trace its operations must have kernels.

    Keras's layers have them, but for a `Lambda`, which holds code of a user's. Raises a
    NotImplementedError where the layer would compute in float32 instead.
    """
    if (
        not backend.in_symbolic_scope()
        or record.kind not in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        or layer.compute_dtype not in HALF
        or not (record.settings.has_defaults and CALLS.may_keep)
        or structure.graph_of(layer) is not None
        or _is_of_keras(layer)
    ):
        return call()
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    outputs = call()
    abandoned = _abandoned.setdefault(graph, set())
    operations = graph.get_operations()[num_before:]
    for each in operations:
        dtype = None if each.name in abandoned else _half_without_kernel(each)
        if dtype is not None:
            abandoned.update(each.name for each in operations)
            raise NotImplementedError(_MISSING.format(each.type, dtype))
    return outputs


def missing(error: BaseException) -> str | None:
    """Returns what `checked` has said, out of what Keras has made of its error."""
    found = re.search(_MISSING.format(r"\w+", r"\w+"), str(error))
    return found[0] if found else None


def _is_of_keras(layer: keras.layers.Layer) -> bool:
    is_lambda = isinstance(layer, keras.layers.Lambda)
    return type(layer).__module__.startswith("keras.") and not is_lambda


def _half_without_kernel(operation: tf.Operation) -> str | None:
    """Returns the half-precision dtype that an operation has no kernel for, if any."""
    for attribute in operation.op_def.attr:
        if attribute.type == "type":
            dtype = operation.get_attr(attribute.name)
            is_half = dtype in (tf.float16, tf.bfloat16)
            if is_half and not _has_kernel(operation.type, attribute.name, dtype):
                return str(dtype.name)
    return None


@functools.cache
def _has_kernel(operation: str, attribute: str, dtype: tf.DType) -> bool:
    """Returns whether an operation can run in a dtype, on a device that is here.

    An operation without any kernel is one that TensorFlow replaces.
    """
    here = {device.device_type for device in tf.config.list_physical_devices()}
    dtypes = [
        [
            value
            for each in kernel.constraint
            if each.name == attribute
            for value in each.allowed_values.list.type
        ]
        for kernel in kernels.get_registered_kernels_for_op(operation).kernel
        if kernel.device_type in here
    ]
    number = dtype.as_datatype_enum
    return not dtypes or any(not each or number in each for each in dtypes)
