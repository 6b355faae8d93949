"""Tries a layer's call and its gradient in a trace that is thrown away.

A layer may run in half precision although its gradient cannot be built there: a
`tf.custom_gradient` that returns float32, a `TensorArray` of float32, `digamma`, whose
gradient has no half-precision kernel. The first step of training then fails, where
nothing can be tried any more without side effects. So the first trace of a layer for
its shapes takes a gradient, too; a layer that has not been traced when it is called is
traced ahead of that call.

Only operations of the layer's own code are differentiated, between the sublayers that
it calls. Keras's layers are not tried: their gradients are known to work.

Relies on: the call context keeping `training` for layers that are called inside;
`Layer.built` being set ahead of the layer's own trace, and not before Keras's trace
that builds it; uninitialized variables having no `_value`.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import utils
from keras.src.backend.common import global_state

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.layers import (
    CALLS,
    Kind,
    Policy,
    policy_of,
    update,
)
from tfamp.keras_hooks.patches import replaced

BOTH = (False, True)  # in training, and not
# Operations whose gradient works in half precision, in the dtype of their inputs.
_PLAIN = frozenset(
    "Abs Add AddN AddV2 BatchMatMulV2 BatchMatMulV3 BiasAdd BroadcastTo Cast ConcatV2 "
    "Conv2D Cos Div Einsum Elu Exp ExpandDims GatherNd GatherV2 Identity LeakyRelu "
    "Log Log1p LogSoftmax MatMul Max MaxPool Maximum Mean Min Minimum Mul Neg "
    "OnesLike Pack Pad PadV2 Pow RealDiv Reciprocal Relu Relu6 Reshape ReverseV2 "
    "Rsqrt Select SelectV2 Selu Sigmoid Sin Slice Softmax Softplus Softsign Split "
    "SplitV Sqrt Square SquaredDifference Squeeze StopGradient StridedSlice Sub Sum "
    "Tanh Tile TopKV2 Transpose Unpack ZerosLike".split()
)
_OTHER_DTYPE = "its gradient comes back in {} for an input in {}"


def is_of_keras(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer holds no code of a user, as a `Lambda` does."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return is_of_keras(layer.layer)  # whose `call` is a part of its own
    is_lambda = isinstance(layer, keras.layers.Lambda)
    return type(layer).__module__.startswith("keras.") and not is_lambda


def may_be_tried(layer: keras.layers.Layer, policy: Policy) -> bool:
    """Returns whether a layer's own operations run in half precision by default."""
    return (
        policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and policy.settings.has_defaults
        and CALLS.may_keep
        and layer.compute_dtype in HALF
        and structure.graph_of(layer) is None
        and not is_of_keras(layer)
    )


def is_untried(layer: keras.layers.Layer, policy: Policy, kwargs: Any) -> bool:
    """Returns whether a call that is coming has to be tried ahead of it."""
    if policy.tried == BOTH or policy.kind not in (Kind.FOLLOWS, Kind.OUTPUT_CAST):
        return False
    if not policy.settings.is_half or is_of_keras(layer):
        update(layer, tried=BOTH)
        return False
    if backend.in_symbolic_scope() or set(_phases(layer, kwargs)) <= {*policy.tried}:
        return False
    return may_be_tried(layer, policy)


def trace_ahead(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Traces the call that is coming; errors are those of the call itself, if any.

    A layer that cannot run or be differentiated in half precision is kept in float32.
    """
    with (
        contextlib.suppress(Exception),
        replaced(CALLS, recorder=CALLS.recorder or (lambda *_: None)),
        without_python_effects(layer),
    ):
        structure.trace_call(layer, args, kwargs)
    note_call(layer, kwargs)


def note_call(layer: keras.layers.Layer, kwargs: Any) -> None:
    """Notes that such a call of a layer was tried."""
    note_tried(layer, _phases(layer, kwargs))


def note_tried(
    layer: keras.layers.Layer, phases: Iterable[bool] = BOTH
) -> Policy | None:
    """Notes that a layer needs not be tried any more, in training or not."""
    policy = policy_of(layer)
    if policy is None or {*phases} <= {*policy.tried}:
        return policy
    return update(layer, tried=tuple(sorted({*policy.tried, *phases})))


def _phases(layer: keras.layers.Layer, kwargs: Any) -> tuple[bool, ...]:
    """Returns what of training and inference a call shows of a layer."""
    if not getattr(layer, "_call_has_training_arg", False):
        return BOTH
    training = kwargs.get("training")
    if training is None:
        context = global_state.get_global_attribute("current_call_ctx")
        training = getattr(context, "training", None)
    if training is None or isinstance(training, bool | int):
        return (bool(training),)
    return (True,)


class Trial:
    """What one call of a layer computes itself, in the graph of a trace."""

    def __init__(self, layer: keras.layers.Layer, kwargs: Any) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self.layer = layer
        self._phases = _phases(layer, kwargs)
        self._num_before = len(self.graph.get_operations())
        self._given: list[Any] = []  # to sublayers
        self._returned: list[Any] = []  # by sublayers
        self._left_out: set[int] = set()  # places of the operations of sublayers

    def is_done(self, policy: Policy) -> bool:
        """Returns whether a gradient was taken of such a call before."""
        return {*self._phases} <= {*policy.tried}

    @contextlib.contextmanager
    def leaving_out(self, inner: "Trial | None") -> Iterator[None]:
        """Leaves out what a sublayer computes, which is tried by itself if at all.

        Args:
            inner: What the sublayer computes itself, where that is tried.
        """
        start = len(self.graph.get_operations())
        try:
            with replaced(CALLS, trial=inner):
                yield
        finally:
            end = len(self.graph.get_operations())
            self._left_out.update(range(start, end))

    def bound(self, given: Any, returned: Any) -> None:
        """Takes note of what a sublayer was given, and what it returned."""
        self._given.append(given)
        self._returned.append(returned)

    def operations(self, start: int | None = None) -> list[tf.Operation]:
        """Returns the operations since the call began, those of sublayers too."""
        start = self._num_before if start is None else start
        operations: list[tf.Operation] = self.graph.get_operations()
        return operations[start:]

    def differentiate(self, given: Any, outputs: Any) -> list[tf.Operation]:
        """Takes the gradient of the call; returns the operations that are its own.

        What is raised here is raised again in training.
        """
        if any(each._value is None for each in self.layer.variables):
            return []  # they are made by this very trace
        start = len(self.graph.get_operations())
        losses = structure.own_losses(self.layer)
        targets = self._floats((outputs, losses, self._given))
        if not targets:
            return []
        reads = [
            each.outputs[0]
            for each in self.operations()
            if each.type == "ReadVariableOp"
        ]
        sources = self._floats((given, self._returned, reads))
        note_tried(self.layer, self._phases)
        if not sources or all(map(_is_plain, self._own_operations(start))):
            return []
        try:
            gradients = tf.gradients(targets, sources, stop_gradients=sources)
        except LookupError:  # it has none, in any dtype
            return self.operations(start)
        for source, gradient in zip(sources, gradients, strict=True):
            if gradient is not None and gradient.dtype != source.dtype:
                dtypes = gradient.dtype.name, source.dtype.name
                raise TypeError(_OTHER_DTYPE.format(*dtypes))
        return self.operations(start)

    def _own_operations(self, end: int) -> list[tf.Operation]:
        operations = self.graph.get_operations()
        places = range(self._num_before, end)
        return [operations[place] for place in places if place not in self._left_out]

    def _floats(self, tensors: Any) -> list[tf.Tensor]:
        """Returns each floating-point tensor of the graph in a structure once."""
        parts = structure.flatten(tensors)
        flat = tf.nest.flatten(parts, expand_composites=True)
        found = {
            id(each): each
            for each in flat
            if isinstance(each, tf.Tensor)
            and each.dtype.is_floating
            and getattr(each, "graph", None) is self.graph
        }
        return list(found.values())


def _is_plain(operation: tf.Operation) -> bool:
    """Returns whether the gradient of an operation needs not be tried."""
    takes = [x.dtype for x in operation.inputs]
    gives = [x.dtype for x in operation.outputs]
    if not (
        any(map(_is_differentiable, takes)) and any(map(_is_differentiable, gives))
    ):
        return True
    if operation.type not in _PLAIN:
        return False
    try:
        operation.get_attr("_gradient_op_type")
    except ValueError:
        return True
    return False  # it has a gradient of the user's own


def _is_differentiable(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating) or dtype == tf.variant


@contextlib.contextmanager
def messages_held() -> Iterator[None]:
    """Drops what TensorFlow logs in the block where the block fails.

    It complains of dtypes that a layer is not going to compute in.
    """
    held, is_outermost = CALLS.messages, CALLS.messages is None
    if held is None:
        held = CALLS.messages = []
        tf.get_logger().addFilter(_hold)
    num_before = len(held)
    try:
        yield
    except BaseException:
        del held[num_before:]
        raise
    finally:
        if is_outermost:
            CALLS.messages = None
            tf.get_logger().removeFilter(_hold)
            for each in held:
                tf.get_logger().handle(each)


def _hold(message: logging.LogRecord) -> bool:
    if CALLS.messages is None:
        return True
    CALLS.messages.append(message)
    return False


@contextlib.contextmanager
def without_python_effects(root: keras.layers.Layer) -> Iterator[None]:
    """Runs the Python code of layers in the block as if it had not run.

    What this thread prints is dropped, and numbers that the layers hold are put back,
    but where the block makes something that the layer goes on to hold.
    """
    parts = [layer for _, layer, _ in structure.walk(root) if not is_of_keras(layer)]
    before = [
        (layer, {*vars(layer)}, _numbers(layer))
        for layer in parts
        if layer.built or utils.is_default(layer.build)
    ]
    with _stdout_muted():
        yield
    for layer, names, numbers in before:
        if {*vars(layer)} - {"_build_shapes_dict"} <= names:
            vars(layer).update(numbers)


def _numbers(layer: keras.layers.Layer) -> dict[str, Any]:
    return {k: v for k, v in vars(layer).items() if type(v) in (int, float)}


@contextlib.contextmanager
def _stdout_muted() -> Iterator[None]:
    stream = sys.stdout
    if stream is None:
        yield
        return
    muted = _Muted(stream)
    sys.stdout = muted
    try:
        yield
    finally:
        muted.is_on = False  # another thread may have put one around it
        if sys.stdout is muted:
            sys.stdout = stream


class _Muted:
    """A stream that takes nothing from one thread."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()
        self.is_on = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.is_on and threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))
