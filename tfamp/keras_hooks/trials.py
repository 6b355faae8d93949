"""Tries a layer's own code in half precision, in a trace that is thrown away.

A layer of the user's may be traced in half precision and have no kernel there, as
`tf.linalg.cholesky`, or no gradient, as a `tf.custom_gradient` that returns float32.
The first step would fail, where nothing can be tried any more without side effects. So
the trace by which Keras finds a layer's shapes looks for kernels and takes a gradient,
too; a layer that has not been traced when it is called is traced ahead of that call.
The trace shows as well whether a layer makes whole numbers, such as ids, of its inputs.

Only operations of the layer's own code are looked at, between the sublayers that it
calls. Keras's layers are not tried: they are known to work.

Relies on: Keras calling the backend's `compute_output_spec` with a layer's `call`; the
call context keeping `training` for layers that are called inside; `Layer.built` being
set ahead of the layer's own trace, and not before the trace that builds it;
uninitialized variables having no `_value`; the registry of kernels in TensorFlow.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import utils
from keras.src.backend.common import global_state
from tensorflow.python.framework import kernels

from tfamp.keras_hooks import backend, structure
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.exact_values import cast_outputs
from tfamp.keras_hooks.layers import CALLS, SOURCE, Kind, Policy, policy_of, update
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper

BOTH = frozenset((False, True))  # in training, and not
EXACT = "default: exact inputs"  # the rule of layers that make whole numbers
_TABLES = (keras.layers.Embedding, keras.layers.IntegerLookup, keras.layers.Hashing)
_MOVES = frozenset(
    "BroadcastTo ExpandDims GatherNd GatherV2 Identity PreventGradient Reshape "
    "ReverseV2 Roll Slice Split SplitV Squeeze StopGradient StridedSlice Tile "
    "Transpose Unpack".split()
)
# Through which raw features are followed to the whole numbers that are made of them.
_FOLLOWED = _MOVES | frozenset(
    "Abs Add AddN AddV2 Cast Ceil ClipByValue ConcatV2 Cumsum Div DivNoNan Exp Expm1 "
    "Floor FloorDiv FloorMod Log Log1p Max Maximum Mean Min Minimum MirrorPad Mod Mul "
    "MulNoNan Neg Pack Pad PadV2 Pow Prod RealDiv Relu Relu6 Rint Round Select "
    "SelectV2 Sign Sqrt Square Sub Sum".split()
)
_READS = frozenset(
    "ArgMax ArgMin AsString Bucketize Cast If LowerBound PartitionedCall StatelessIf "
    "UpperBound".split()
)
_COMPARES = frozenset("Equal Greater GreaterEqual Less LessEqual NotEqual".split())


class MissingKernelError(NotImplementedError):
    """TensorFlow has no kernel for an operation in half precision."""


def patches(after_error: Callable[..., Any]) -> list[Patch]:
    """Returns the patch on traces for shapes; `after_error` is that of `calls`."""

    @wrapper
    def wrap(original: Function, fn: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(fn, "__self__", None)
        policy = policy_of(layer) if isinstance(layer, keras.layers.Layer) else None
        if layer is None or policy is None:
            return original(fn, *args, **kwargs)
        is_call, was_built = fn == layer.call, layer.built
        is_cast = is_call and layer.autocast and structure.graph_of(layer) is None

        def call(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(fn, *args, **kwargs)
            has_weights = was_built and is_call
            return checked(layer, policy, run, (args, kwargs), has_weights=has_weights)

        def trace() -> Any:
            # As the layer's own call does, which is left out where it is built.
            given: Any = args, kwargs
            if is_cast and backend.is_float_dtype(layer.compute_dtype):
                given = cast_outputs(given, layer.compute_dtype)
            is_inside = CALLS.stack and CALLS.stack[-1] is policy
            inside = CALLS.stack if is_inside else [*CALLS.stack, policy]
            with replaced(CALLS, stack=inside):
                return original(call, *given[0], **given[1])

        rule = policy.rule
        try:
            return trace()
        except Exception as error:
            # Ahead of an eager call Keras goes on, and the call itself is repeated.
            if was_built or not is_call or not is_symbolic(args, kwargs):
                raise
            return after_error(layer, rule, error, trace)

    return [Patch(keras_backend, "compute_output_spec", wrap)]


def is_symbolic(args: Any, kwargs: Any) -> bool:
    """Returns whether a call builds a Functional graph."""
    flat = structure.flatten((args, kwargs))
    return any(isinstance(x, keras.KerasTensor) for x in flat)


def is_of_keras(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer holds no code of a user, as a `Lambda` does."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return is_of_keras(layer.layer)  # whose `call` is a part of its own
    is_lambda = isinstance(layer, keras.layers.Lambda)
    return type(layer).__module__.startswith("keras.") and not is_lambda


def _may_be_tried(layer: keras.layers.Layer, policy: Policy) -> bool:
    """Returns whether a layer's own operations run in half precision by default."""
    return (
        policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and policy.settings.has_defaults
        and CALLS.may_keep
        and layer.compute_dtype in ("float16", "bfloat16")
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
    if backend.in_symbolic_scope() or _phases(layer, kwargs) <= policy.tried:
        return False
    return _may_be_tried(layer, policy)


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
    note_tried(layer, kwargs)


def note_tried(layer: keras.layers.Layer, kwargs: Any = None) -> None:
    """Notes that such a call of a layer was tried; without arguments, that all were."""
    policy = policy_of(layer)
    if policy is not None:
        policy.tried |= BOTH if kwargs is None else _phases(layer, kwargs)


def _phases(layer: keras.layers.Layer, kwargs: Any) -> frozenset[bool]:
    """Returns what of training and inference a call shows of a layer."""
    if not getattr(layer, "_call_has_training_arg", False):
        return BOTH
    training = kwargs.get("training")
    if training is None:
        context = global_state.get_global_attribute("current_call_ctx")
        training = getattr(context, "training", None)
    is_known = training is None or isinstance(training, bool | int)
    return frozenset((bool(training) if is_known else True,))


def checked(
    layer: keras.layers.Layer,
    policy: Policy,
    call: Callable[[], Any],
    given: tuple[Any, dict[str, Any]],
    *,
    has_weights: bool = True,
) -> Any:
    """Returns what a call returns; a trace must have kernels for it and a gradient.

    `given` are the arguments by position and by name; `failure` tells what was raised.
    """
    if not backend.in_symbolic_scope():
        return call()
    CALLS.failed = None
    outer, asking, inner = CALLS.trial, CALLS.asking, None
    if _may_be_tried(layer, policy) or CALLS.differentiated is layer:
        inner = _Trial(layer, given)
    if inner is None and asking is None:
        return call()
    with (
        outer.left_out() if outer else contextlib.nullcontext(),
        replaced(CALLS, trial=inner, asking=inner or asking),
    ):
        try:
            outputs = call()
            if inner is not None:
                inner.check(policy, outputs, has_weights=has_weights)
        except Exception as error:
            if CALLS.failed is None or CALLS.failed[0] is not layer:
                CALLS.failed = layer, error, False
            raise
    if outer is not None:
        outer.given_on.append(given)
        outer.returned.append(outputs)
    if asking is not None and takes_ids(layer, policy):
        asking.ids += asking.floats(given)
    return outputs


def failure(layer: keras.layers.Layer) -> tuple[Exception | None, bool]:
    """Returns what a trace of this layer raised last, and whether of its gradient."""
    failed, CALLS.failed = CALLS.failed, None
    is_of_layer = failed is not None and failed[0] is layer
    return failed[1:] if is_of_layer else (None, False)


def takes_ids(layer: keras.layers.Layer, policy: Policy) -> bool:
    """Returns whether a layer looks up, bins or encodes exact inputs."""
    return policy.exact_inputs and (
        policy.rule == EXACT or isinstance(layer, (*_TABLES, backend.DataLayer))
    )


class _Trial:
    """What one call of a layer computes itself, in the graph of a trace."""

    def __init__(
        self, layer: keras.layers.Layer, given: tuple[Any, dict[str, Any]]
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._layer, self._given = layer, given
        self._phases = _phases(layer, given[1])
        self._start = self._count()
        self._left_out: set[int] = set()  # places of the operations of sublayers
        self.given_on: list[Any] = []  # to sublayers
        self.returned: list[Any] = []  # by sublayers
        self.ids: list[tf.Tensor] = []  # given to layers that look ids up

    def _count(self) -> int:
        return len(self._graph.get_operations())

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leaves out what a sublayer computes, which is tried by itself if at all."""
        start = self._count()
        try:
            yield
        finally:
            self._left_out.update(range(start, self._count()))

    def check(self, policy: Policy, outputs: Any, *, has_weights: bool) -> None:
        """Raises where the call has no kernels, or no gradient that has them."""
        whole = self._graph.get_operations()
        own = [
            each
            for place, each in enumerate(whole)
            if place >= self._start and place not in self._left_out
        ]
        is_kept, of_gradient = CALLS.differentiated is self._layer, False
        is_tried = self._phases <= policy.tried
        try:
            if not is_kept:
                _check_kernels(own)
            if has_weights and (is_kept or not is_tried):
                of_gradient = True
                _check_kernels(self._differentiate(own, outputs))
        except Exception as error:
            CALLS.failed = self._layer, error, of_gradient
            raise
        if not is_kept:
            self._note_exactness(policy, own, whole[self._start :])

    def _differentiate(
        self, own: list[tf.Operation], outputs: Any
    ) -> list[tf.Operation]:
        """Takes the gradient of the call; returns the operations that are its own.

        What is raised here is raised again in training.
        """
        if any(each._value is None for each in self._layer.variables):
            return []  # they are made by this very trace
        start, losses = self._count(), structure.own_losses(self._layer)
        targets = self.floats((outputs, losses, self.given_on))
        if not targets:
            return []
        whole = self._graph.get_operations()[self._start :]
        reads = [each.outputs[0] for each in whole if each.type == "ReadVariableOp"]
        sources = self.floats((self._given, self.returned, reads))
        note_tried(self._layer, self._given[1])
        if not sources:
            return []
        try:
            gradients = tf.gradients(targets, sources, stop_gradients=sources)
        except LookupError:  # it has none, in any dtype
            gradients = []
        for source, gradient in zip(sources, gradients, strict=False):
            if gradient is not None and gradient.dtype != source.dtype:
                raise TypeError(
                    f"its gradient comes back in {gradient.dtype.name} for an input in "
                    f"{source.dtype.name}"
                )
        return list(self._graph.get_operations()[start:])

    def _note_exactness(
        self, policy: Policy, own: list[tf.Operation], whole: list[tf.Operation]
    ) -> None:
        """Has a layer take exact inputs that slices them, or makes whole numbers."""
        direct = {id(x) for x in self.floats(self._given)}
        ids, is_own = set(direct), {id(each) for each in own}
        only_moves = bool(direct) and not self.returned and not self._layer.weights
        for each in whole:
            takes = [x for x in each.inputs if id(x) in ids]
            if not takes:
                continue
            gives_floats = any(y.dtype.is_floating for y in each.outputs)
            if not gives_floats and id(each) in is_own and _reads(each, takes):
                policy.settings.keep_exact(self._layer)
                return
            is_cast = each.type == "Cast" and each.outputs[0].dtype in HALF
            only_moves &= is_cast or each.type in _MOVES | {"Shape"}
            if each.type in _FOLLOWED:
                ids.update(id(y) for y in each.outputs if y.dtype.is_floating)
        if any(
            id(x) in ids - direct and not hasattr(x, SOURCE) and x.dtype.is_floating
            for x in self.ids
        ):
            policy.settings.keep_exact(self._layer)
        elif only_moves and not isinstance(self._layer, keras.Model):
            half = policy.settings.compute_dtype
            update(self._layer, exact_inputs=True, output_dtype=half)

    def floats(self, tensors: Any) -> list[tf.Tensor]:
        """Returns each floating-point tensor of the graph in a structure once."""
        parts = structure.flatten(tensors)
        flat = tf.nest.flatten(parts, expand_composites=True)
        found = {
            id(each): each
            for each in flat
            if isinstance(each, tf.Tensor)
            and each.dtype.is_floating
            and getattr(each, "graph", None) is self._graph
        }
        return list(found.values())


def _reads(operation: tf.Operation, takes: Iterable[tf.Tensor]) -> bool:
    """Returns whether an operation makes what is no number of raw features."""
    if operation.type in _COMPARES:  # those in half precision were rounded alike
        return any(x.dtype not in HALF for x in takes)
    return operation.type in _READS and any(
        y.dtype.is_integer or y.dtype == tf.string for y in operation.outputs
    )


def _check_kernels(operations: Iterable[tf.Operation]) -> None:
    for each in operations:
        for name in (a.name for a in each.op_def.attr if a.type == "type"):
            dtype = each.get_attr(name)
            if dtype in HALF and not _has_kernel(each.type, name, dtype):
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


@contextlib.contextmanager
def without_python_effects(root: keras.layers.Layer) -> Iterator[None]:
    """Runs the Python code of layers in the block as if it had not run.

    What this thread prints is dropped, and numbers that the layers hold are put back,
    but where the block makes something that the layer goes on to hold.
    """
    before = [
        (layer, dict(vars(layer)))
        for layer in structure.layers_of(root)
        if not is_of_keras(layer) and (layer.built or utils.is_default(layer.build))
    ]
    muted = _Muted(sys.stdout)
    try:
        with contextlib.redirect_stdout(muted):
            yield
    finally:
        muted.thread = 0  # another thread may have put one around it
    for layer, held in before:
        if {*vars(layer)} - {"_build_shapes_dict"} <= held.keys():
            numbers = {k: v for k, v in held.items() if type(v) in (int, float)}
            vars(layer).update(numbers)


class _Muted:
    """A stream that takes nothing from one thread."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        is_muted = threading.get_ident() == self.thread
        return len(text) if is_muted else int(self._stream.write(text))
