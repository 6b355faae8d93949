"""Hooks where layers are called.

Relies on: `Layer.__call__` casting its inputs through
`DTypePolicy.convert_input`, opening the autocast scope and then calling
`super().__call__`, which the TensorFlow base class of `Layer` does not define;
outputs of that call becoming the layer's outputs before the graph node, the
mask and the activity regularizer see them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree, utils
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.layer import TFLayer
from keras.src.layers.layer import might_have_unbuilt_state

from tfamp.keras_hooks import backend, half_kernels, trials
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.exact_values import rounded, source_of
from tfamp.keras_hooks.layers import CALLS, SOURCE, Kind, Policy, policy_of
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
            rule = policy.rule
            try:
                return half_kernels.checked(
                    self,
                    policy,
                    lambda: original(self, *args, **kwargs),
                    (args, kwargs),
                )
            except Exception as error:
                if not _may_repeat(self, args, kwargs):
                    raise
                return after_error(
                    self, rule, error, lambda: run(self, *args, **kwargs)
                )

        @like(original)
        def __call__(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
            # AutoGraph rewrites what a `tf.function` is made of, and all that this
            # calls but functions of Keras, which `run` passes for.
            return run(self, *args, **kwargs)

        return __call__

    return [
        Patch(keras.layers.Layer, "__call__", wrap_outer),
        Patch(
            keras.layers.Layer,
            "_maybe_build",
            lambda original: _wrap_maybe_build(original, after_error),
        ),
        Patch(
            TFLayer,
            "__call__",
            lambda original: _inner_call(original, after_build),
            optional=True,
        ),
        Patch(_DATA_LAYER, "__call__", _wrap_data_layer),
    ]


def _may_repeat(layer: keras.layers.Layer, args: Any, kwargs: Any) -> bool:
    """Returns whether a call can be repeated without effects of a user's code."""
    return (
        backend.in_symbolic_scope()
        or trials.is_of_keras(layer)
        or any(isinstance(x, keras.KerasTensor) for x in tree.flatten((args, kwargs)))
    )


def in_call() -> bool:
    """Returns whether this thread is inside the call of any layer.

    A layer without a `build` of its own is built by a trace of its `call`, for which
    Keras has not opened its call context yet.
    """
    if CALLS.num_builds:
        return True
    return global_state.get_global_attribute("current_call_ctx") is not None


@contextlib.contextmanager
def _outside_the_trace() -> Iterator[None]:
    """Leaves tfamp's own trace, if there is one, as a plain first call would.

    What `build` keeps must not be a tensor of a graph that is thrown away.
    """
    if CALLS.recorder is None:
        yield
        return
    scopes = backend.global_attributes(stateless_scope=None, symbolic_scope=None)
    with scopes, tf.init_scope():
        yield


def _wrap_maybe_build(
    original: Callable[..., Any], after_error: Callable[..., Any]
) -> Callable[..., Any]:
    """Marks that a layer is being built, and builds it outside tfamp's own trace."""

    @like(original)
    def _maybe_build(self: keras.layers.Layer, call_spec: Any) -> Any:
        if self.built:
            return original(self, call_spec)
        building = replaced(CALLS, num_builds=CALLS.num_builds + 1)
        with building, _outside_the_trace():
            policy = policy_of(self)
            if policy is not None and utils.is_default(self.build):
                _build_by_trace(self, policy, call_spec, after_error)
            return original(self, call_spec)

    return _maybe_build


def _build_by_trace(
    layer: keras.layers.Layer,
    policy: Policy,
    call_spec: Any,
    after_error: Callable[..., Any],
) -> None:
    """Builds the sublayers as Keras does, which only warns where `call` raises.

    Ahead of an eager call Keras goes on without a word, and then has no shape to build
    the layer with when it is loaded. Its own trace is enough there but for a layer to
    which outputs of sublayers are cast.
    """
    is_enough = call_spec.eager and policy.inner_dtype is None
    if is_enough or not might_have_unbuilt_state(layer):
        return

    def call(**arguments: Any) -> Any:
        return half_kernels.checked(
            layer,
            policy,
            lambda: layer.call(**arguments),
            ((), arguments),
            has_weights=False,
        )

    def trace() -> Any:
        dtype, given = layer.compute_dtype, call_spec.arguments_dict
        arguments = tree.map_structure(
            lambda x: cast_outputs(x, dtype) if isinstance(x, keras.KerasTensor) else x,
            given,
        )
        # What sublayers return may be cast for this layer, as in its own call.
        inside = [*CALLS.stack, policy_of(layer) or policy]
        with replaced(CALLS, stack=inside):
            return backend.compute_output_spec(call, **arguments)

    rule = policy.rule
    try:
        trace()
    except Exception as error:
        with contextlib.suppress(Exception):  # Keras raises or warns of it in turn
            after_error(layer, rule, error, trace)


def _data_layer_class() -> type:
    """Returns the base class of preprocessing layers, whose name has changed."""
    ancestors = keras.layers.Normalization.__mro__[1:]
    return next(cls for cls in ancestors if "__call__" in vars(cls))


_DATA_LAYER = _data_layer_class()
_feature = functools.partial(source_of, is_feature=True)


@wrapper
def _wrap_data_layer(
    original: Function, self: keras.layers.Layer, inputs: Any, **kwargs: Any
) -> Any:
    """Hands preprocessing layers exact inputs before they cast them themselves."""
    policy = policy_of(self)
    if policy is not None and policy.exact_inputs:
        inputs = tree.map_structure(_feature, inputs)
    if policy is not None and policy.settings.has_defaults:
        dtype = self.compute_dtype
        if tf.as_dtype(dtype) in HALF and not tf.executing_eagerly():
            inputs = tree.map_structure(lambda x: rounded(x, dtype), inputs)
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
        if policy.exact_inputs:
            source = _feature if isinstance(self, _DATA_LAYER) else source_of
            args, kwargs = tree.map_structure(source, (args, kwargs))
        if not CALLS.stack and policy.settings.compute_dtype == "float16":
            CALLS.note_float16(self)
        CALLS.stack.append(policy)
        try:
            outputs = call(*args, **kwargs)
        finally:
            CALLS.stack.pop()
        output_dtype = policy.output_dtype
        is_outermost = not (CALLS.stack or CALLS.num_builds)
        if CALLS.is_training and is_outermost and policy.settings.has_defaults:
            # For the code of a `train_step`, as a model's output is.
            output_dtype = "float32"
        elif CALLS.stack:
            output_dtype = _inside(CALLS.stack[-1], policy)
        if output_dtype is not None:
            outputs = cast_outputs(outputs, output_dtype)
        if CALLS.recorder is not None:
            CALLS.recorder(self, outputs)
        return outputs

    return __call__


def _inside(outer: Policy, policy: Policy) -> str | None:
    """Returns what the outputs of a layer are cast to in the layer that calls it."""
    is_own_dtype = policy.kind is Kind.EXPLICIT and outer.inner_dtype != "float32"
    if outer.inner_dtype is None or is_own_dtype:
        return policy.output_dtype
    return outer.inner_dtype


def cast_outputs(outputs: Any, dtype: str) -> Any:
    """Casts every floating-point tensor of a nested structure to `dtype`.

    The mask and the logits that Keras hangs on a tensor stay with it.
    """

    def cast(x: Any) -> Any:
        if isinstance(x, keras.KerasTensor):
            if not backend.is_float_dtype(x.dtype) or x.dtype == dtype:
                return x
            return keras.KerasTensor(
                x.shape, dtype=dtype, sparse=x.sparse, ragged=x.ragged
            )
        if not tf.is_tensor(x) or not x.dtype.is_floating:
            return x
        y = x if x.dtype == dtype else backend.cast(x, dtype)
        if y is not x and hasattr(x, "_keras_mask"):
            y._keras_mask = x._keras_mask
        if y.dtype in HALF and x.dtype not in HALF:
            # Another layer in float32 takes it as it was: it may be beyond range.
            setattr(y, SOURCE, x)
        if hasattr(x, "_keras_logits"):  # a loss takes them in the output's place
            y._keras_logits = backend.cast(x._keras_logits, dtype)
        return y

    return tree.map_structure(cast, outputs)
