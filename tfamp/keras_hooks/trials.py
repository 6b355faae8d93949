"""Tries a layer's own code in half precision, in a trace that is thrown away.

The trace by which Keras finds the shapes of a layer of the user's looks for kernels and
takes a gradient, too, as the first step could not be tried without side effects; a
layer that has not been traced is traced ahead of its call. The trace shows as well
whether it makes whole numbers, such as ids, of its inputs. Only operations of its own
code are looked at, between the sublayers that it calls.

Relies on: Keras calling the backend's `compute_output_spec` with a layer's `call`; the
call context keeping `training` for layers that are called inside; `Layer.built` being
set ahead of the layer's own trace, and not before the trace that builds it;
uninitialized variables having no `_value`; layers assigning by `Variable.assign`, whose
`dtype` is that of the autocast scope, and adding losses by `Layer.add_loss`; constants
of graphs being made by `_create_graph_constant`; the registry of kernels in TensorFlow,
and `_functions` of its graphs, by name.
"""

import contextlib
import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import utils
from keras.src.backend.common import global_state
from tensorflow.python.framework import kernels
from tensorflow.python.framework import ops as framework

from tfamp.keras_hooks import backend, numbers, structure
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.exact_values import cast_outputs
from tfamp.keras_hooks.layers import (
    CALLS,
    IN_HALF,
    SOURCE,
    Policy,
    policy_of,
    update,
)
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper
from tfamp.keras_hooks.structure import Layer

# The rules that are found so: of layers that make whole numbers, that assign weights
# what they make, that add losses, that write numbers which half precision has not, that
# call Python, and that take sines.
EXACT, STATE, OWN_LOSS, CONSTANT, PYTHON, ANGLES = FOUND = (
    "default: exact inputs",
    "default: running state",
    "default: own loss",
    "default: constants",
    "default: Python functions",
    "default: sines",
)
# What prepares data; the name of the base class of most has changed.
PREPARING: tuple[type, ...] = (
    next(c for c in keras.layers.Normalization.__mro__[1:] if "__call__" in vars(c)),
    *(keras.layers.Hashing, keras.layers.HashedCrossing, keras.layers.IntegerLookup),
    *(keras.layers.StringLookup, keras.layers.TextVectorization),
    *(keras.layers.Pipeline, keras.layers.STFTSpectrogram),
)
PREPARATION = "default: preprocessing"  # the rule that keeps it in float32
_TABLES = (keras.layers.Embedding, *PREPARING)
_MOVES = frozenset(
    "BroadcastTo ExpandDims GatherNd GatherV2 Identity PreventGradient Reshape "
    "ReverseV2 Roll Shape Slice Split SplitV Squeeze StopGradient StridedSlice Tile "
    "Transpose Unpack".split()
)
# Behind products, and what is traced apart, no number is a raw feature any more.
_MIXES = re.compile("MatMul|Conv|Einsum|While|Call")
_READS = frozenset(
    "ArgMax ArgMin AsString Bucketize Cast If LowerBound PartitionedCall StatelessIf "
    "UpperBound".split()
)
_COMPARES = frozenset("Equal Greater GreaterEqual Less LessEqual NotEqual".split())
# Of a layer's calls that many ways are tried; it may be noted that all were.
_MOST_WAYS, _ALL = 16, frozenset({"all"})
# Layers of the user's around others that were tried.
_TRIED: "weakref.WeakSet[Any]" = weakref.WeakSet()
_Given = tuple[Any, dict[str, Any]]  # arguments by position and by name


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
        is_call, was_built, rule = fn == layer.call, layer.built, policy.rule
        is_own = is_call and structure.graph_of(layer) is None

        def call(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(fn, *args, **kwargs)
            given = args, kwargs
            return checked(layer, policy, run, given, was_built) if is_call else run()

        def trace() -> Any:
            # As the layer's own call does, which is left out where it is built.
            given: Any = args, kwargs
            is_cast = is_own and layer.autocast
            if is_cast and backend.is_float_dtype(layer.compute_dtype):
                given = cast_outputs(given, layer.compute_dtype)
            is_inside = CALLS.stack and CALLS.stack[-1] is policy
            inside = CALLS.stack if is_inside else [*CALLS.stack, policy]
            with replaced(CALLS, stack=inside):
                return original(call, *given[0], **given[1])

        try:
            return trace()
        except Exception as error:
            # Ahead of an eager call Keras goes on, and the call itself is repeated.
            if was_built or not is_call or not is_symbolic(args, kwargs):
                raise
            return after_error(layer, rule, error, trace)

    return [
        Patch(keras_backend, "compute_output_spec", wrap),
        Patch(backend.KerasVariable, "assign", _wrap_assign),
        Patch(Layer, "add_loss", _wrap_add_loss),
        Patch(framework, "_create_graph_constant", _wrap_constant),
    ]


@wrapper
def _wrap_assign(original: Function, self: Any, value: Any) -> Any:
    """Notes that the layer being tried keeps what it reads, or makes, rounded."""
    if CALLS.trial is not None and self._dtype not in HALF:
        if self.dtype in HALF or getattr(value, "dtype", None) in HALF:
            CALLS.trial.found = STATE
    return original(self, value)


@wrapper
def _wrap_add_loss(original: Function, self: Layer, *args: Any, **kwargs: Any) -> Any:
    """Notes that the layer being tried adds a loss, by whatever function."""
    if CALLS.trial is not None and CALLS.trial.layer is self:
        CALLS.trial.found = OWN_LOSS
    return original(self, *args, **kwargs)


@wrapper
def _wrap_constant(
    original: Function, value: Any, dtype: Any, *args: Any, **kwargs: Any
) -> Any:
    """Notes that the layer being tried writes a number that is another in half."""
    trial = CALLS.trial
    if trial is None or dtype not in HALF:
        return original(value, dtype, *args, **kwargs)
    with np.errstate(over="ignore"):  # NumPy would warn of what is thrown away
        made = original(value, dtype, *args, **kwargs)
    if numbers.is_lost(value, dtype):
        trial.lost.append((made, float(np.min(value))))
    return made


def is_symbolic(args: Any, kwargs: Any) -> bool:
    """Returns whether a call builds a Functional graph."""
    flat = structure.flatten((args, kwargs))
    return any(isinstance(x, keras.KerasTensor) for x in flat)


def prepares(layer: Layer) -> bool:
    """Returns whether a layer prepares data; a `Rescaling` may be any part of a model.

    KerasHub has a base class of its own for those that do.
    """
    if any(cls.__name__ == "PreprocessingLayer" for cls in type(layer).__mro__):
        return True
    is_scale = isinstance(layer, keras.layers.Rescaling)
    return isinstance(layer, PREPARING) and not is_scale


def is_of_keras(layer: Layer) -> bool:
    """Returns whether a layer holds no code of a user, as a `Lambda` does."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return is_of_keras(layer.layer)  # whose `call` is a part of its own
    is_lambda = isinstance(layer, keras.layers.Lambda)
    return type(layer).__module__.startswith("keras.") and not is_lambda


def runs_in_half(layer: Layer, policy: Policy) -> bool:
    """Returns whether a layer's own operations run in half precision by default."""
    return (
        policy.kind in IN_HALF
        and policy.settings.has_defaults
        # What the call makes that is tried was not there before.
        and (CALLS.may_keep or policy.made_in_call)
        and layer.compute_dtype in ("float16", "bfloat16")
        and structure.graph_of(layer) is None
    )


def is_untried(layer: Layer, policy: Policy, given: _Given) -> bool:
    """Returns whether a call that is coming has to be tried ahead of it."""
    if policy.kind not in IN_HALF or policy.tried >= _ALL:
        return False
    if not policy.settings.is_half or is_of_keras(layer):
        note_tried(layer)
        return False
    if backend.in_symbolic_scope() or _ways(layer, given) <= policy.tried:
        return False
    return runs_in_half(layer, policy)  # none of Keras comes here


def trace_ahead(layer: Layer, args: Any, kwargs: Any) -> None:
    """Tries the call that is coming; errors are those of the call itself, if any."""
    with contextlib.suppress(Exception):
        look(layer, args, kwargs)
    note_tried(layer, (args, kwargs))


def look(layer: Layer, args: Any, kwargs: Any) -> Any:
    """Traces the call that is coming, without effects; returns what `_Trial` holds."""
    found: list[_Trial] = []
    with replaced(CALLS, trial=None, looked=found), without_python_effects(layer):
        structure.trace_call(layer, args, kwargs)
    return found[-1]


def note_tried(layer: Layer, given: _Given | None = None) -> None:
    """Notes that such a call of a layer was tried; without arguments, that all were."""
    policy = policy_of(layer)
    if policy is not None:
        policy.tried |= _ALL if given is None else _ways(layer, given)
        if len(policy.tried) > _MOST_WAYS:
            policy.tried |= _ALL
        if structure.children(layer) and not is_of_keras(layer):
            _TRIED.add(layer)


def try_around(model: Layer) -> None:
    """Has layers around a model be tried anew, as what it gives has changed."""
    tried: list[Layer] = []
    with contextlib.suppress(RuntimeError):  # where another thread tries one
        tried += _TRIED
    for layer in tried:
        policy = policy_of(layer)
        inside = any(each is model for each in structure.layers_of(layer))
        if policy is not None and inside and layer is not model:
            policy.tried = frozenset()


def _ways(layer: Layer, given: _Given) -> set[Any]:
    """Returns what a call shows of a layer: in training (True) or not, which branches.

    Branches are told by arguments behind the first one: which there are, and the values
    of flags and words.
    """
    args, kwargs = given
    branch = tuple(
        (key, value if type(value) in (bool, str) else None)
        for key, value in (*enumerate(args[1:], 1), *sorted(kwargs.items()))
        if not (key == "training" or value is None or value is False)
    )
    if not layer.autocast:  # it computes in what it is given
        dtypes = (getattr(x, "dtype", None) for x in structure.flatten(given))
        branch += (("given", " ".join(map(str, dtypes))),)
    if not getattr(layer, "_call_has_training_arg", False):
        return {(False, branch), (True, branch)}
    training = kwargs.get("training")
    if training is None:
        context = global_state.get_global_attribute("current_call_ctx")
        training = getattr(context, "training", None)
    is_known = training is None or isinstance(training, bool | int)
    return {(bool(training) if is_known else True, branch)}


def checked(
    layer: Layer,
    policy: Policy,
    call: Callable[[], Any],
    given: _Given,
    has_weights: bool = True,
) -> Any:
    """Returns what a call returns; a trace must have kernels for it and a gradient.

    `has_weights` is False in the trace that makes them, which takes no gradient.
    `failure` tells what was raised.
    """
    if not backend.in_symbolic_scope():
        return call()
    CALLS.failed = None
    is_tried = runs_in_half(layer, policy) and not is_of_keras(layer)
    is_tried, outer = is_tried or CALLS.differentiated is layer, CALLS.trial
    if outer is None and CALLS.looked is None and not is_tried:
        return call()
    inner = _Trial(layer, policy, given, is_tried)
    with replaced(CALLS, trial=inner):
        try:
            inner.outputs = call()
            if is_tried:
                inner.check(has_weights)
        except Exception as error:
            is_known = CALLS.failed is not None and CALLS.failed[0] is layer
            if inner.is_differentiated or not is_known:
                CALLS.failed = layer, error, inner.is_differentiated
            raise
        finally:
            inner.end = inner.count()
    if outer is not None and outer.graph is inner.graph:
        outer.inside.append(inner)
    elif outer is None and CALLS.looked is not None:
        CALLS.looked.append(inner)
    return inner.outputs


def failure(layer: Layer) -> tuple[Exception | None, bool]:
    """Returns what a trace of this layer raised last, and whether of its gradient."""
    failed, CALLS.failed = CALLS.failed or (None, None, False), None
    return failed[1:] if failed[0] is layer else (None, False)


def takes_ids(layer: Any) -> bool:
    """Returns whether a layer looks up, bins or encodes exact inputs."""
    policy = policy_of(layer)
    if policy is None or not policy.exact_inputs:
        return False
    return policy.rule == EXACT or isinstance(layer, _TABLES)


class _Trial:
    """One call of a layer in the graph of a trace, and those inside of it."""

    def __init__(self, layer: Layer, policy: Policy, given: _Given, is_tried: bool):
        self.layer, self._policy, self._given = layer, policy, given
        self.graph, self._is_tried = tf.compat.v1.get_default_graph(), is_tried
        self.outputs: Any = None
        self.is_differentiated = False  # whether what fails is its gradient
        self.found = ""  # the rule by which it has to be in float32
        # Numbers of its code that half precision has not, with the least of each.
        self.lost: list[tuple[tf.Tensor, float]] = []
        self.inside: list[_Trial] = []
        self._start = self.end = self.count()

    def count(self) -> int:
        """Returns the number of operations in the graph."""
        return len(self.graph.get_operations())

    def calls(self) -> "Iterator[_Trial]":
        """Yields the calls inside in the order they end, innermost first."""
        for each in self.inside:
            yield from each.calls()
            yield each

    def ids(self) -> list[tf.Tensor]:
        """Returns what is given to layers inside that look ids up."""
        found = []
        for each in self.inside:
            if takes_ids(each.layer):
                found += self.floats(each._given)
            elif not each._is_tried:
                found += each.ids()
        return found

    def check(self, has_weights: bool) -> None:
        """Raises where the call has no kernels, or no gradient that has them."""
        whole = self.graph.get_operations()[self._start :]
        inside = {n for each in self.inside for n in range(each._start, each.end)}
        places = enumerate(whole, self._start)
        own = [operation for place, operation in places if place not in inside]
        is_kept = CALLS.differentiated is self.layer
        is_known = _ways(self.layer, self._given) <= self._policy.tried
        if not is_kept:
            _check_kernels(own)
            self.lost += filter(None, map(numbers.lost_by_cast, own))
            if any(numbers.is_used(*each) for each in self.lost):
                self.found = CONSTANT
            if any(map(numbers.calls_python, own)):
                self.found = PYTHON
            if numbers.takes_angles(own, {id(x) for x in self.floats(self._given)}):
                self.found = ANGLES
        if has_weights and (is_kept or not is_known):
            self.is_differentiated = True
            _check_kernels(self._differentiate(whole))
        if self.found and not is_kept:
            self._policy.settings.keep_found(self.layer, self.found)
        elif not is_kept:
            self._note_exactness(own, whole)

    def _differentiate(self, whole: list[tf.Operation]) -> list[tf.Operation]:
        """Takes the gradient of the call; returns the operations that are its own."""
        if any(each._value is None for each in self.layer.variables):
            return []  # they are made by this very trace
        start, losses = self.count(), list(structure.own_losses(self.layer))
        given_on = [each._given for each in self.inside]
        targets = self.floats((self.outputs, losses, given_on))
        reads = [each.outputs[0] for each in whole if each.type == "ReadVariableOp"]
        returned = [each.outputs for each in self.inside]
        sources = self.floats((self._given, returned, reads))
        if not targets:
            return []
        note_tried(self.layer, self._given)
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
        return list(self.graph.get_operations()[start:])

    def _note_exactness(
        self, own: list[tf.Operation], whole: list[tf.Operation]
    ) -> None:
        """Has a layer take exact inputs that slices them, or makes whole numbers."""
        direct = {id(x) for x in self.floats(self._given)}
        ids, is_own = set(direct), {id(each) for each in own}
        only_moves = bool(direct) and not (self.inside or self.layer.weights)
        settings = self._policy.settings
        if any(map(numbers.makes_whole, own)):
            settings.keep_found(self.layer, EXACT)
            return
        for each in whole:
            takes = [x for x in each.inputs if id(x) in ids]
            if not takes:
                continue
            gives_floats = any(y.dtype.is_floating for y in each.outputs)
            if not gives_floats and id(each) in is_own and _reads(each, takes):
                settings.keep_found(self.layer, EXACT)
                return
            is_cast = each.type == "Cast" and each.outputs[0].dtype in HALF
            only_moves &= is_cast or each.type in _MOVES
            if not _MIXES.search(each.type):
                ids.update(id(y) for y in each.outputs if y.dtype.is_floating)
        if any(id(x) in ids - direct and not hasattr(x, SOURCE) for x in self.ids()):
            settings.keep_found(self.layer, EXACT)
        elif only_moves and not isinstance(self.layer, keras.Model):
            half = settings.compute_dtype
            update(self.layer, exact_inputs=True, output_dtype=half)

    def floats(self, tensors: Any) -> list[tf.Tensor]:
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


def _reads(operation: tf.Operation, takes: Iterable[tf.Tensor]) -> bool:
    """Returns whether an operation makes what is no number of raw features."""
    if operation.type in _COMPARES:  # those in half precision were rounded alike
        return any(x.dtype not in HALF for x in takes)
    return operation.type in _READS and any(
        y.dtype.is_integer or y.dtype == tf.string for y in operation.outputs
    )


def _with_inner(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and those of the functions that they call."""
    for each in operations:
        yield each
        kinds = {a.name: a.type for a in each.op_def.attr if "func" in a.type}
        for name, kind in kinds.items():
            given = each.get_attr(name)
            for called in given if kind == "list(func)" else [given]:
                function = each.graph._functions.get(called.name)
                graph = getattr(function, "graph", None)
                if graph is not None:
                    yield from _with_inner(graph.get_operations())


def _check_kernels(operations: Iterable[tf.Operation]) -> None:
    for each in _with_inner(operations):
        if _is_dilated(each) and not tf.config.list_physical_devices("GPU"):
            raise MissingKernelError(
                "TensorFlow has no kernel for a CPU that computes a dilated "
                f"{each.type} in float16"
            )
        for name in (a.name for a in each.op_def.attr if a.type == "type"):
            dtype = each.get_attr(name)
            if dtype in HALF and not _has_kernel(each.type, name, dtype):
                raise MissingKernelError(
                    f"TensorFlow has no kernel that computes {each.type} in "
                    f"{dtype.name}"
                )


def _is_dilated(operation: tf.Operation) -> bool:
    """Returns whether an operation is the gradient of a dilated convolution."""
    return (
        operation.type in ("Conv2DBackpropInput", "Conv2DBackpropFilter")
        and operation.get_attr("T") == tf.float16
        and max(operation.get_attr("dilations")) > 1
    )


@functools.cache
def _has_kernel(operation: str, attribute: str, dtype: tf.DType) -> bool:
    """Returns whether an operation has a kernel here, or none at all."""
    here = {device.device_type for device in tf.config.list_physical_devices()}
    known = kernels.get_registered_kernels_for_op(operation).kernel
    fits = [
        all(
            dtype.as_datatype_enum in each.allowed_values.list.type
            for each in kernel.constraint
            if each.name == attribute
        )
        for kernel in known
        if kernel.device_type in here
    ]
    return not fits or any(fits)


@contextlib.contextmanager
def without_python_effects(root: Layer) -> Iterator[None]:
    """Drops what this thread prints in the block, and puts numbers of layers back.

    But where the block makes something that the layer goes on to hold.
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
