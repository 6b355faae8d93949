"""Hooks where layers are called.

Relies on: `Layer.__call__` casting its inputs through `DTypePolicy.convert_input`,
building the layer by its `build`, opening the autocast scope and then calling
`super().__call__`, which the TensorFlow base class of `Layer` does not define; outputs
of that call becoming the layer's outputs before the graph node, the mask and the
activity regularizer see them; `Layer._losses` holding what was added; a `FeatureSpace`
calling its layers in a `__call__` of its own, and making some of them there.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.layer import TFLayer

from tfamp.keras_hooks import backend, structure, trials
from tfamp.keras_hooks.exact_values import (
    cast_outputs,
    known_integers,
    source_of,
    widened,
)
from tfamp.keras_hooks.layers import CALLS, Kind, Policy, policy_of
from tfamp.keras_hooks.patches import Function, Patch, like, replaced, wrapper
from tfamp.keras_hooks.structure import Layer
from tfamp.records.formats import HALF


def patches(
    before_call: Callable[..., None],
    after_build: Callable[[Layer], None],
    after_error: Callable[..., Any],
) -> list[Patch]:
    """Returns the patches around a layer's call.

    `before_call(layer, args, kwargs)` is called ahead of the first calls, and of those
    in training as long as a rule of the user has matched nothing, before inputs are
    cast; `after_build(layer)` once a kept layer is built; `after_error(layer, rule,
    error, again)` where a call has raised that may be repeated: it returns outputs, or
    raises. `rule` is what had decided ahead of the call, `again` repeats it.
    """

    def wrap_outer(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def run(self: Layer, *args: Any, **kwargs: Any) -> Any:
            policy = policy_of(self)
            if (
                policy is None
                or not (policy.is_decided and policy.is_resolved)
                or (kwargs.get("training") is True and policy.settings.open_rules)
                or trials.is_untried(self, policy, (args, kwargs))
            ):
                before_call(self, args, kwargs)
                policy = policy_of(self)
            if policy is None:
                return original(self, *args, **kwargs)
            rule, call = policy.rule, functools.partial(original, self, *args, **kwargs)
            try:
                with _in_float32_on_data(self, policy, args, kwargs):
                    return _inside_the_call(self, policy, call, (args, kwargs))
            except Exception as error:
                # Without effects of a user's code, or as nothing else can help.
                is_free = backend.in_symbolic_scope() or trials.is_of_keras(self)
                is_free |= policy.kind is Kind.HEAD or rule in trials.FOUND
                if not (is_free or trials.is_symbolic(args, kwargs)):
                    raise
                again = functools.partial(run, self, *args, **kwargs)
                return after_error(self, rule, error, again)

        @like(original)
        def __call__(self: Layer, *args: Any, **kwargs: Any) -> Any:
            # AutoGraph rewrites what a `tf.function` is made of, and all that this
            # calls but functions of Keras, which `run` passes for.
            return run(self, *args, **kwargs)

        return __call__

    @wrapper
    def wrap_features(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        before_call(self, args, kwargs)
        policy = policy_of(self)
        stack = CALLS.stack if policy is None else [*CALLS.stack, policy]
        with replaced(CALLS, stack=stack):  # it makes layers, and calls them itself
            return original(self, *args, **kwargs)

    inner = functools.partial(_inner_call, after_build=after_build)
    ways = ("__call__", "get_encoded_features")
    return [
        *(Patch(keras.utils.FeatureSpace, name, wrap_features) for name in ways),
        *trials.patches(after_error),
        Patch(Layer, "__call__", wrap_outer),
        Patch(TFLayer, "__call__", inner, optional=True),
    ]


def in_call() -> bool:
    """Returns whether this thread is inside the call of any layer."""
    # For what a `build` calls Keras has not opened its call context yet.
    context = global_state.get_global_attribute("current_call_ctx")
    return bool(CALLS.depth or CALLS.stack) or context is not None


def _in_float32_on_data(
    layer: Layer, policy: Policy, args: Any, kwargs: Any
) -> contextlib.AbstractContextManager[None]:
    """Has a `Rescaling` prepare data in float32 where it is no part of a model."""
    if not isinstance(layer, keras.layers.Rescaling) or policy.kind is not Kind.FOLLOWS:
        return contextlib.nullcontext()
    is_part = in_call() or trials.is_symbolic(args, kwargs)
    if is_part or not policy.settings.has_defaults:
        return contextlib.nullcontext()
    return replaced(policy, kind=Kind.FLOAT32_INSIDE)


def _inside_the_call(
    layer: Layer, policy: Policy, call: Callable[[], Any], given: Any
) -> Any:
    """Calls a layer; in tfamp's own trace it is built as by a first call.

    What `build` keeps must not be a tensor of a graph that is thrown away.
    """
    CALLS.depth += 1
    try:
        if layer.built or CALLS.looked is None:
            outputs = trials.checked(layer, policy, call, given)
        else:
            with replaced(layer, build=_outside_the_trace(layer.build)):
                outputs = trials.checked(layer, policy, call, given)
    finally:
        CALLS.depth -= 1
    losses = structure.own_losses(layer)
    if losses:  # which Keras adds to the main one, in float32
        losses[:] = map(widened, losses)
    return outputs


@wrapper
def _outside_the_trace(original: Function, *args: Any, **kwargs: Any) -> Any:
    scopes = backend.global_attributes(stateless_scope=None, symbolic_scope=None)
    with scopes, tf.init_scope():
        return original(*args, **kwargs)


def _inner_call(
    original: Function | None, after_build: Callable[[Layer], None]
) -> Function:
    """Returns a method for `TFLayer`, which has none: the next class in line has."""

    def __call__(self: Layer, *args: Any, **kwargs: Any) -> Any:
        if original is None:
            call = super(TFLayer, self).__call__
        else:
            call = functools.partial(original, self)
        policy = policy_of(self)
        if policy is None:
            return call(*args, **kwargs)
        if policy.is_kept and not policy.is_propagated:
            after_build(self)
        # A graph casts its inputs ahead of those that ask.
        graph = structure.graph_of(self)
        dtypes = [] if graph is None else [x.dtype for x in graph.inputs]
        is_wide = graph is not None and all(dtype == "float32" for dtype in dtypes)
        if dtypes and dtypes[0] in HALF and len({*dtypes}) == 1:
            args, kwargs = known_integers((args, kwargs), dtypes[0])
        is_preparing = isinstance(self, trials.PREPARING)
        is_preparing |= policy.rule == trials.PREPARATION
        if policy.exact_inputs or is_wide:
            exact = functools.partial(source_of, through_cast=is_preparing)
            args, kwargs = structure.map_structure(exact, (args, kwargs))
        is_data = is_preparing and not trials.is_symbolic(args, kwargs)
        if not CALLS.stack and policy.settings.is_half:
            CALLS.has_given_half = True
            if policy.settings.compute_dtype == "float16":
                CALLS.note_float16(self)
        CALLS.stack.append(policy)
        try:
            outputs = call(*args, **kwargs)
        finally:
            CALLS.stack.pop()
        output_dtype = _output_dtype(policy, is_data and policy.is_kept)
        if output_dtype is not None:
            outputs = cast_outputs(outputs, output_dtype)
        return outputs

    return __call__


def _output_dtype(policy: Policy, prepares: bool) -> str | None:
    """Returns what outputs of a call that ends here are cast to, None to leave them.

    `prepares` states whether a kept layer prepares data.
    """
    outer = CALLS.stack[-1] if CALLS.stack else None
    is_outermost = outer is None and CALLS.depth <= 1
    for_code = CALLS.is_training or CALLS.is_evaluating or prepares
    if for_code and is_outermost and policy.settings.has_defaults:
        return "float32"  # for code of the user's, as a model's output is
    if outer is not None and outer.inner_dtype is not None:
        # But what the user made in a dtype of its own, beside a head.
        if policy.kind is not Kind.EXPLICIT or outer.inner_dtype == "float32":
            return outer.inner_dtype
    return policy.output_dtype
