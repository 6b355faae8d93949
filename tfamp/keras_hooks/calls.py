"""Hooks where layers are called.

Relies on: `Layer.__call__` casting its inputs through
`DTypePolicy.convert_input`, building the layer by its `build`, opening the autocast
scope and then calling `super().__call__`, which the TensorFlow base class of `Layer`
does not define; outputs of that call becoming the layer's outputs before the graph
node, the mask and the activity regularizer see them.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.layer import TFLayer

from tfamp.keras_hooks import backend, structure, trials
from tfamp.keras_hooks.exact_values import cast_outputs, source_of
from tfamp.keras_hooks.layers import CALLS, Kind, Policy, policy_of
from tfamp.keras_hooks.patches import Function, Patch, like, replaced, wrapper


def patches(
    before_call: Callable[..., None],
    after_build: Callable[[keras.layers.Layer], None],
    after_error: Callable[..., Any],
) -> list[Patch]:
    """Returns the patches around a layer's call.

    Args:
        before_call: Called as `before_call(layer, args, kwargs)` ahead of the first
            calls of a managed layer, and of those in training as long as a rule of the
            user has matched nothing, before its inputs are cast.
        after_build: Called with a kept layer once it is built, ahead of its own `call`.
        after_error: Called as `after_error(layer, rule, error, again)` where the call
            of a managed layer has raised where it may be repeated: in a trace for
            shapes; returns outputs, or raises. `rule` is what had decided ahead of it,
            `again` repeats it.
    """

    def wrap_outer(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def run(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
            policy = policy_of(self)
            if (
                policy is None
                or not (policy.is_decided and policy.is_resolved)
                or (kwargs.get("training") is True and policy.settings.open_rules)
                or trials.is_untried(self, policy, kwargs)
            ):
                before_call(self, args, kwargs)
                policy = policy_of(self)
            if policy is None:
                return original(self, *args, **kwargs)
            rule, call = policy.rule, functools.partial(original, self, *args, **kwargs)
            try:
                return _inside_the_call(self, policy, call, (args, kwargs))
            except Exception as error:
                # Without effects of a user's code.
                is_free = backend.in_symbolic_scope() or trials.is_of_keras(self)
                if not (is_free or trials.is_symbolic(args, kwargs)):
                    raise
                again = functools.partial(run, self, *args, **kwargs)
                return after_error(self, rule, error, again)

        @like(original)
        def __call__(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
            # AutoGraph rewrites what a `tf.function` is made of, and all that this
            # calls but functions of Keras, which `run` passes for.
            return run(self, *args, **kwargs)

        return __call__

    return [
        *trials.patches(after_error),
        Patch(keras.layers.Layer, "__call__", wrap_outer),
        Patch(
            TFLayer,
            "__call__",
            lambda original: _inner_call(original, after_build),
            optional=True,
        ),
        Patch(backend.DataLayer, "__call__", _wrap_data_layer),
    ]


def in_call() -> bool:
    """Returns whether this thread is inside the call of any layer.

    For what a `build` calls Keras has not opened its call context yet.
    """
    if CALLS.depth or CALLS.stack:
        return True
    return global_state.get_global_attribute("current_call_ctx") is not None


def _inside_the_call(
    layer: keras.layers.Layer, policy: Policy, call: Callable[[], Any], given: Any
) -> Any:
    """Calls a layer; in tfamp's own trace it is built as by a first call.

    What `build` keeps must not be a tensor of a graph that is thrown away.
    """
    CALLS.depth += 1
    try:
        if CALLS.recorder is None or layer.built:
            return trials.checked(layer, policy, call, given)
        with replaced(layer, build=_outside_the_trace(layer.build)):
            return trials.checked(layer, policy, call, given)
    finally:
        CALLS.depth -= 1


@wrapper
def _outside_the_trace(original: Function, *args: Any, **kwargs: Any) -> Any:
    scopes = backend.global_attributes(stateless_scope=None, symbolic_scope=None)
    with scopes, tf.init_scope():
        return original(*args, **kwargs)


@wrapper
def _wrap_data_layer(
    original: Function, self: keras.layers.Layer, inputs: Any, **kwargs: Any
) -> Any:
    """Hands preprocessing layers exact inputs before they cast them themselves."""
    policy = policy_of(self)
    if policy is not None and policy.exact_inputs:
        inputs = tree.map_structure(source_of, inputs)
    return original(self, inputs, **kwargs)


def _inner_call(
    original: Callable[..., Any] | None,
    after_build: Callable[[keras.layers.Layer], None],
) -> Callable[..., Any]:
    """Returns a method for `TFLayer`, which has none: the next class in line has."""

    def __call__(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if original is None:
            call = super(TFLayer, self).__call__
        else:
            call = functools.partial(original, self)
        policy = policy_of(self)
        if policy is None:
            return call(*args, **kwargs)
        if policy.is_kept and not policy.is_propagated:
            after_build(self)
        # A graph casts its inputs to float32 ahead of those that ask.
        graph = structure.graph_of(self)
        is_wide = graph is not None and all(x.dtype == "float32" for x in graph.inputs)
        if policy.exact_inputs or is_wide:
            args, kwargs = tree.map_structure(source_of, (args, kwargs))
        if not CALLS.stack and policy.settings.compute_dtype == "float16":
            CALLS.note_float16(self)
        CALLS.stack.append(policy)
        try:
            outputs = call(*args, **kwargs)
        finally:
            CALLS.stack.pop()
        outer = CALLS.stack[-1] if CALLS.stack else None
        output_dtype = policy.output_dtype
        is_outermost = outer is None and CALLS.depth <= 1
        if CALLS.is_training and is_outermost and policy.settings.has_defaults:
            # For the code of a `train_step`, as a model's output is.
            output_dtype = "float32"
        elif outer is not None and outer.inner_dtype is not None:
            # But what the user made in a dtype of its own, beside a head.
            if policy.kind is not Kind.EXPLICIT or outer.inner_dtype == "float32":
                output_dtype = outer.inner_dtype
        if output_dtype is not None:
            outputs = cast_outputs(outputs, output_dtype)
        if CALLS.recorder is not None:
            CALLS.recorder(self, outputs)
        return outputs

    return __call__
