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
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from tensorflow.python.framework import kernels

from tfamp.keras_hooks import backend, trials
from tfamp.keras_hooks.layers import CALLS, Policy, policy_of
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper

# Operations of calls that were repeated in float32: nothing uses their results.
_abandoned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


class MissingKernelError(NotImplementedError):
    """TensorFlow has no kernel for an operation in half precision."""


def patches() -> list[Patch]:
    """Returns the patch on traces for shapes."""
    return [Patch(keras_backend, "compute_output_spec", _wrap)]


@wrapper
def _wrap(original: Function, fn: Any, *args: Any, **kwargs: Any) -> Any:
    layer = getattr(fn, "__self__", None)
    policy = policy_of(layer) if isinstance(layer, keras.layers.Layer) else None
    if layer is None or policy is None:
        return original(fn, *args, **kwargs)
    # Or this trace is what builds it, or one of a loss.
    has_weights = layer.built and fn == layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        given = args, kwargs
        run = functools.partial(fn, *args, **kwargs)
        return checked(layer, policy, run, given, has_weights=has_weights)

    return original(call, *args, **kwargs)


def checked(
    layer: keras.layers.Layer,
    policy: Policy,
    call: Callable[[], Any],
    given: tuple[Any, dict[str, Any]],
    *,
    has_weights: bool = True,
) -> Any:
    """Returns what a call returns; a trace must have kernels for it and a gradient.

    Keras's layers have them, but for a `Lambda`, which holds code of a user's. Where
    the layer would compute in float32 instead, `failure` tells of what is raised.

    Args:
        layer: The layer that is called.
        policy: Its policy.
        call: Calls it.
        given: The arguments of the call, by position and by name.
        has_weights: Whether the layer has all its weights, as a gradient needs.
    """
    if not backend.in_symbolic_scope():
        return call()
    CALLS.failed = None
    outer, inner = CALLS.trial, None
    if trials.may_be_tried(layer, policy) or CALLS.differentiated is layer:
        inner = trials.Trial(layer, given[1])
    if outer is None and inner is None:
        return call()
    held = contextlib.nullcontext() if inner is None else trials.messages_held()
    with held, outer.leaving_out(inner) if outer else replaced(CALLS, trial=inner):
        try:
            outputs = call()
            if inner is not None:
                _try(inner, policy, given, outputs, has_weights)
        except Exception as error:
            if CALLS.failed is None or CALLS.failed[0] is not layer:
                CALLS.failed = layer, error, False
            raise
    if outer is not None:
        outer.bound(given, outputs)
    return outputs


def _try(
    trial: trials.Trial,
    policy: Policy,
    given: Any,
    outputs: Any,
    has_weights: bool,
) -> None:
    """Raises where a layer's call has no kernels, or no gradient that has them."""
    abandoned = _abandoned.setdefault(trial.graph, set())
    of_call = trial.operations()
    is_kept, of_gradient = CALLS.differentiated is trial.layer, False
    try:
        if not is_kept:
            _check_kernels(of_call, abandoned)
        if has_weights and (is_kept or not trial.is_done(policy)):
            of_gradient = True
            _check_kernels(trial.differentiate(given, outputs), abandoned)
    except Exception as error:
        abandoned.update(each.name for each in of_call)
        CALLS.failed = trial.layer, error, of_gradient
        raise
    finally:
        abandoned.update(each.name for each in trial.operations()[len(of_call) :])


def failure(layer: keras.layers.Layer) -> tuple[Exception | None, bool]:
    """Returns what a trace of this layer raised last, and whether of its gradient."""
    failed, CALLS.failed = CALLS.failed, None
    is_of_layer = failed is not None and failed[0] is layer
    return failed[1:] if is_of_layer else (None, False)


def _check_kernels(operations: Iterable[tf.Operation], abandoned: set[str]) -> None:
    for each in operations:
        types = [a.name for a in each.op_def.attr if a.type == "type"]
        for name in types if each.name not in abandoned else ():
            dtype = each.get_attr(name)
            if dtype in backend.HALF and not _has_kernel(each.type, name, dtype):
                raise MissingKernelError(
                    f"TensorFlow has no kernel that computes {each.type} in "
                    f"{dtype.name}"
                )


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
