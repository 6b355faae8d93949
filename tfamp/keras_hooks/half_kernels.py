"""Finds operations of a layer that TensorFlow cannot run in half precision.

Tracing accepts them, as their definition allows the dtype: `tf.linalg.cholesky` in
float16, `tf.nn.local_response_normalization` or `tf.math.lgamma` in bfloat16. The first
step then fails for want of a kernel. They are looked for where Keras or tfamp traces a
layer for its shapes, since nothing can be taken out of the graph of a step.

Relies on: `Operation.compute_output_spec` calling the backend's function of that name
with the layer's `call`; the registry of kernels in TensorFlow, which names the dtypes
that each kernel is for.
"""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from tensorflow.python.framework import kernels

from tfamp.keras_hooks import backend, trials
from tfamp.keras_hooks.layers import CALLS, Policy, policy_of
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper

_MISSING = "TensorFlow has no kernel that computes {} in {}"
# Operations of calls that were repeated in float32: nothing uses their results.
_abandoned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def patches() -> list[Patch]:
    """Returns the patch on traces for shapes."""
    return [Patch(keras_backend, "compute_output_spec", _wrap)]


@wrapper
def _wrap(original: Function, fn: Any, *args: Any, **kwargs: Any) -> Any:
    layer = getattr(fn, "__self__", None)
    record = policy_of(layer) if isinstance(layer, keras.layers.Layer) else None
    if layer is None or record is None:
        return original(fn, *args, **kwargs)
    # Or this trace is what builds it, or one of a loss.
    has_weights = layer.built and fn == layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return checked(
            layer,
            record,
            lambda: fn(*args, **kwargs),
            (args, kwargs),
            has_weights=has_weights,
        )

    return original(call, *args, **kwargs)


def checked(
    layer: keras.layers.Layer,
    record: Policy,
    call: Callable[[], Any],
    given: tuple[Any, dict[str, Any]],
    *,
    has_weights: bool = True,
) -> Any:
    """Returns what a call returns; a trace must have kernels for it and a gradient.

    Keras's layers have them, but for a `Lambda`, which holds code of a user's. Raises
    where the layer would compute in float32 instead: a NotImplementedError for want of
    a kernel, or what its gradient raises, which `failed_gradient` then tells.

    Args:
        layer: The layer that is called.
        record: What is known of it.
        call: Calls it.
        given: The arguments of the call, by position and by name.
        has_weights: Whether the layer has all its weights, as a gradient needs.
    """
    if not backend.in_symbolic_scope():
        return call()
    CALLS.failed = None
    outer, inner = CALLS.trial, None
    if trials.may_be_tried(layer, record) or CALLS.differentiated is layer:
        inner = trials.Trial(layer, given[1])
    if outer is None and inner is None:
        return call()
    with contextlib.ExitStack() as stack:
        if inner is not None:
            stack.enter_context(trials.messages_held())
        if outer is None:
            stack.enter_context(replaced(CALLS, trial=inner))
        else:
            stack.enter_context(outer.leaving_out(inner))
        outputs = call()
        if inner is not None:
            _try(inner, record, given, outputs, has_weights)
    if outer is not None:
        outer.bound(given, outputs)
    return outputs


def _try(
    trial: trials.Trial,
    record: Policy,
    given: tuple[Any, dict[str, Any]],
    outputs: Any,
    has_weights: bool,
) -> None:
    """Raises where a layer's call has no kernels, or no gradient that has them."""
    abandoned = _abandoned.setdefault(trial.graph, set())
    operations = trial.operations()
    is_kept = CALLS.differentiated is trial.layer
    try:
        if not is_kept:
            _check_kernels(operations, abandoned)
    except NotImplementedError:
        abandoned.update(each.name for each in operations)
        raise
    if not has_weights or (trial.is_done(record) and not is_kept):
        return
    try:
        _check_kernels(trial.differentiate(given, outputs), abandoned)
    except Exception as error:
        abandoned.update(each.name for each in operations)
        CALLS.failed = trial.layer, error
        raise
    finally:
        of_gradient = trial.operations()[len(operations) :]
        abandoned.update(each.name for each in of_gradient)


def _check_kernels(operations: list[tf.Operation], abandoned: set[str]) -> None:
    for each in operations:
        dtype = None if each.name in abandoned else _half_without_kernel(each)
        if dtype is not None:
            raise NotImplementedError(_MISSING.format(each.type, dtype))


def failed_gradient(layer: keras.layers.Layer) -> Exception | None:
    """Returns the error of the layer's gradient where `checked` raised that last."""
    failed, CALLS.failed = CALLS.failed, None
    return failed[1] if failed is not None and failed[0] is layer else None


def missing(error: BaseException) -> str | None:
    """Returns what `checked` has said, out of what Keras has made of its error."""
    found = re.search(_MISSING.format(r"\w+", r"\w+"), str(error))
    return found[0] if found else None


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
