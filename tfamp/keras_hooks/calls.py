"""Hooks where layers are called.

Relies on: `Layer.__call__` casting its inputs through
`DTypePolicy.convert_input`, building the layer by its `build`, opening the autocast
scope and then calling `super().__call__`, which the TensorFlow base class of `Layer`
does not define; outputs of that call becoming the layer's outputs before the graph
node, the mask and the activity regularizer see them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.layer import TFLayer

from tfamp.keras_hooks import backend, structure, trials
from tfamp.keras_hooks.exact_values import cast_outputs, source_of
from tfamp.keras_hooks.layers import CALLS, Kind, policy_of
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
            CALLS.depth += 1
            try:
                with _built_outside_the_trace(self):
                    return trials.checked(self, policy, call, (args, kwargs))
            except Exception as error:
                if not _may_repeat(self, args, kwargs):
                    raise
                failed = error
            finally:
                CALLS.depth -= 1
            again = functools.partial(run, self, *args, **kwargs)
            return after_error(self, rule, failed, again)

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


def _may_repeat(layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
    """Returns whether a call can be repeated without effects of a user's code."""
    is_free = backend.in_symbolic_scope() or trials.is_of_keras(layer)
    return is_free or trials.is_symbolic(args, kwargs)


def in_call() -> bool:
    """Returns whether this thread is inside the call of any layer.

    For what a `build` calls Keras has not opened its call context yet.
    """
    if CALLS.depth or CALLS.stack:
        return True
    return global_state.get_global_attribute("current_call_ctx") is not None


@contextlib.contextmanager
def _built_outside_the_trace(layer: keras.layers.Layer) -> Iterator[None]:
    """Has a layer that is called in tfamp's own trace be built as by a first call.

    What `build` keeps must not be a tensor of a graph that is thrown away.
    """
    if CALLS.recorder is None or layer.built:
        yield
        return
    original = layer.build

    @like(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        scopes = backend.global_attributes(stateless_scope=None, symbolic_scope=None)
        with scopes, tf.init_scope():
            return original(*args, **kwargs)

    with replaced(layer, build=build):
        yield


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
        if policy.exact_inputs or _widens(self):
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


def _widens(layer: keras.layers.Layer) -> bool:
    """Returns whether a graph casts its inputs to float32 ahead of those that ask."""
    graph = structure.graph_of(layer)
    return graph is not None and all(x.dtype == "float32" for x in graph.inputs)
