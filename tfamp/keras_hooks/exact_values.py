"""Has whole numbers made of what values were before they were rounded.

Ids that stand in a column of a float matrix are no numbers to compute with: rounded to
half precision they are others. Inside the call of a managed layer each tensor that was
rounded knows its source; what is made of it by slices, shapes and arithmetic knows how
to be made of the source, which is done only where something asks: an operation that
makes whole numbers or text, or compares in float32 with a value that was not rounded.
No dtype changes, and a user's code runs once.

Relies on: every operation going through `TFE_Py_FastPathExecute` where it runs eagerly,
with its name ahead of its inputs, or through `TFE_Py_Execute` where that gives up, and
through `_apply_op_helper` in a graph; Python's numbers becoming tensors in
`_constant_impl`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import execute as eager_execution
from tensorflow.python.framework import constant_op, op_def_library

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.layers import CALLS, SOURCE
from tfamp.keras_hooks.patches import Patch, like, replaced

_ORIGIN = "_tfamp_origin"  # how it would be made of such sources

_MOVES = frozenset(
    "BroadcastTo ExpandDims GatherNd GatherV2 Identity PreventGradient Reshape "
    "ReverseV2 Roll Slice Split SplitV Squeeze StopGradient StridedSlice Tile "
    "Transpose Unpack".split()
)
_COMBINES = frozenset(
    "Abs Add AddN AddV2 Ceil ClipByValue ConcatV2 Cumsum Div DivNoNan Exp Expm1 Floor "
    "FloorDiv FloorMod Log Log1p Max Maximum Mean Min Minimum MirrorPad Mod Mul "
    "MulNoNan Neg Pack Pad PadV2 Pow Prod RealDiv Relu Relu6 Rint Round Select "
    "SelectV2 Sign Sqrt Square Sub Sum".split()
)
# Those that give no floating-point numbers of floating-point ones.
_READS = frozenset("ArgMax ArgMin AsString Bucketize LowerBound UpperBound".split())
_COMPARES = frozenset("Equal Greater GreaterEqual Less LessEqual NotEqual".split())
_FOLLOWED = _MOVES | _COMBINES | _READS | _COMPARES | {"Cast"}


def patches() -> list[Patch]:
    """Returns the patches on operations and constants of TensorFlow."""
    return [
        Patch(pywrap_tfe, "TFE_Py_FastPathExecute", _wrap_eager),
        Patch(pywrap_tfe, "TFE_Py_Execute", _wrap_fallback),
        Patch(op_def_library, "_apply_op_helper", _wrap_graph),
        Patch(constant_op, "_constant_impl", _wrap_constant),
    ]


def source_of(x: Any, *, is_feature: bool = False) -> Any:
    """Returns what `x` was rounded from, in float32, or `x` itself.

    A part of a raw feature is looked up, too, but gradients pass it by: they go to what
    it was rounded from.
    """
    source = getattr(x, SOURCE, None) if isinstance(x, tf.Tensor) else None
    origin = getattr(x, _ORIGIN, None)
    if source is None and is_feature and origin is not None and origin.is_moved:
        source = origin.value()
    if source is None:
        return x
    exact = backend.convert_to_tensor(source)
    if exact.dtype != tf.float32:
        exact = backend.cast(exact, "float32")
    mask = backend.get_keras_mask(x)
    if mask is not None and backend.get_keras_mask(exact) is None:
        exact = tf.identity(exact)
        backend.set_keras_mask(exact, mask)
    return exact


def unrounded(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in float32: what it was rounded from, where that is known."""
    return backend.cast(source_of(x), "float32")


def rounded(x: Any, dtype: str) -> Any:
    """Returns a tensor or an array in a half-precision dtype, which knows its source.

    What is no number, or in that dtype already, is returned as it is.
    """
    if isinstance(x, tf.Tensor | np.ndarray):
        given = tf.as_dtype(x.dtype)
        if (given.is_floating or given.is_integer) and given != tf.as_dtype(dtype):
            y = tf.cast(x, dtype)
            if not hasattr(y, SOURCE):
                setattr(y, SOURCE, x)
            return y
    return x


class _Origin:
    """How to make a tensor of the sources of what it was made of.

    Attributes:
        is_moved: Whether the values only changed their places, so that layers which
            take exact inputs may have them.
    """

    def __init__(
        self, make: Callable[[], Any], tensor: tf.Tensor, *, is_moved: bool = False
    ) -> None:
        self._make: Callable[[], Any] | None = make
        self._graph = tensor.graph if tf.is_symbolic_tensor(tensor) else None
        self._value: Any = None
        self.is_moved = is_moved

    def value(self) -> Any:
        """Returns the exact tensor, None where it cannot be made.

        It is made once, where the rounded tensor was, so it can stand wherever that
        one can.
        """
        make, self._make = self._make, None
        if make is not None:
            try:
                with replaced(CALLS, stack=[]):
                    if self._graph is not None:
                        with self._graph.as_default():
                            self._value = make()
                    elif tf.executing_eagerly():
                        self._value = make()
                    else:
                        with tf.init_scope():
                            self._value = make()
            except Exception:  # such as two dtypes: then it stays rounded
                self._value = None
        return self._value


def _wrap_eager(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(context: Any, operation: str, name: Any, *args: Any) -> Any:
        if operation not in _FOLLOWED or not _follows():
            return original(context, operation, name, *args)

        def run(given: Any) -> Any:
            return original(context, operation, name, *given)

        target = args[2] if operation == "Cast" else None
        return _followed(operation, args, run, lambda result: result, target)

    return execute


def _wrap_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(
        handle: Any, device: Any, name: Any, inputs: Any, attrs: Any, num_outputs: int
    ) -> Any:
        operation = name.decode() if isinstance(name, bytes) else name
        if operation not in _FOLLOWED - {"Cast"} or not _follows():
            return original(handle, device, name, inputs, attrs, num_outputs)
        is_first = [True]

        def run(given: Any) -> Any:
            given = list(given)
            types = _with_dtype_of(given, attrs)
            result = original(handle, device, name, given, types, num_outputs)
            if is_first:
                is_first.clear()  # its caller records it
            elif eager_execution.must_record_gradient():
                eager_execution.record_gradient(operation, given, types, result)
            return result

        return _followed(operation, tuple(inputs), run, lambda result: result)

    return execute


def _with_dtype_of(inputs: Sequence[Any], attrs: Any) -> Any:
    """Returns attributes with the dtype that floating-point inputs have now."""
    dtypes = [x.dtype for x in inputs if x.dtype.is_floating]
    if attrs is None or not dtypes:
        return attrs
    names, values = attrs[::2], attrs[1::2]
    of_inputs = ("T", "Tparams")
    return tuple(
        each
        for name, value in zip(names, values, strict=True)
        for each in (
            name,
            dtypes[0].as_datatype_enum if name in of_inputs else value,
        )
    )


def _wrap_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def apply(op_type_name: str, name: Any = None, **keywords: Any) -> Any:
        if op_type_name not in _FOLLOWED or not _follows():
            return original(op_type_name, name=name, **keywords)
        names, own_name = tuple(keywords), [name]

        def run(given: Any) -> Any:
            arguments = dict(zip(names, given, strict=True))
            # A name can be that of one operation of a graph.
            name = own_name.pop() if own_name else None
            return original(op_type_name, name=name, **arguments)

        given = tuple(keywords.values())
        target = keywords.get("DstT")
        return _followed(op_type_name, given, run, lambda result: result[3], target)

    return apply


def _wrap_constant(original: Callable[..., Any]) -> Callable[..., Any]:
    def constant(value: Any, *args: Any, **kwargs: Any) -> Any:
        y = original(value, *args, **kwargs)
        if (
            isinstance(value, int | float | np.ndarray | np.generic | list | tuple)
            and isinstance(y, tf.Tensor)
            and y.dtype in HALF
            and _follows()
        ):
            setattr(y, _ORIGIN, _Origin(lambda: _exact_constant(value, y.shape), y))
        return y

    return constant


def _exact_constant(value: Any, shape: Any) -> tf.Tensor:
    exact = np.asarray(value, "float32")
    return tf.constant(exact if exact.size == 1 else exact.reshape(shape))


def _follows() -> bool:
    """States whether a managed layer is being called that has the default rules."""
    return bool(CALLS.stack) and CALLS.stack[-1].settings.has_defaults


def _followed(
    operation: str,
    args: tuple[Any, ...],
    run: Callable[[Any], Any],
    outputs_of: Callable[[Any], Any],
    target: Any = None,
) -> Any:
    """Returns what an operation gives, of exact inputs where it reads whole numbers.

    Args:
        operation: The type of the operation.
        args: Its inputs and attributes, in any order.
        run: Runs it with others in their place.
        outputs_of: Returns the output tensors that are in what `run` returns.
        target: The dtype to cast to, if it does.
    """
    tensors = [x for x in _leaves(args) if isinstance(x, tf.Tensor)]
    known = [x for x in tensors if _is_known(x)]
    if operation == "Cast":
        return _cast(args, run, outputs_of, tf.as_dtype(target))
    if not known or any(x.dtype in HALF and not _is_known(x) for x in tensors):
        return run(args)
    if operation in _COMPARES:
        if all(x.dtype in HALF for x in tensors):  # all were rounded alike
            return run(args)
        exact = _exact_args(args, _of_the_same_kind)
        return run(args if exact is None else exact)
    if operation in _READS:
        exact = _exact_args(args, _wide)
        return run(args if exact is None else exact)
    is_move = operation in _MOVES
    result = run(args)

    def make(number: int | None) -> Any:
        exact = _exact_args(args, _as_it_is if is_move else _wide)
        if exact is None:
            return None
        made = outputs_of(run(exact))
        return made if number is None else made[number]

    outputs = outputs_of(result)
    is_moved = is_move and all(
        hasattr(x, SOURCE) or getattr(x, _ORIGIN).is_moved for x in known
    )
    if isinstance(outputs, tf.Tensor):
        _set_origin(outputs, functools.partial(make, None), is_moved=is_moved)
    else:
        for number, each in enumerate(outputs):
            _set_origin(each, functools.partial(make, number), is_moved=is_moved)
    return result


def _cast(
    args: tuple[Any, ...],
    run: Callable[[Any], Any],
    outputs_of: Callable[[Any], Any],
    target: tf.DType,
) -> Any:
    x = args[0]
    if not isinstance(x, tf.Tensor):
        return run(args)
    if target.is_integer:
        exact = _exact_args(args, _as_it_is) if _is_known(x) else None
        return run(args if exact is None else exact)
    result = run(args)
    if not target.is_floating or x.dtype == tf.bool:
        return result
    outputs = outputs_of(result)
    y = outputs if isinstance(outputs, tf.Tensor) else outputs[0]
    if _is_known(x):
        is_moved = hasattr(x, SOURCE) or getattr(x, _ORIGIN).is_moved
        _set_origin(y, lambda: _exact(x), is_moved=is_moved)
    elif target in HALF and x.dtype not in HALF:
        _set_origin(y, lambda: x)
    return result


def _leaves(args: Any) -> Iterator[Any]:
    for each in args:
        if isinstance(each, list | tuple):
            yield from each
        else:
            yield each


def _is_known(x: Any) -> bool:
    return hasattr(x, SOURCE) or hasattr(x, _ORIGIN)


def _set_origin(
    tensor: tf.Tensor, make: Callable[[], Any], *, is_moved: bool = False
) -> None:
    if tensor.dtype.is_floating and not hasattr(tensor, SOURCE):
        setattr(tensor, _ORIGIN, _Origin(make, tensor, is_moved=is_moved))


def _exact(x: tf.Tensor) -> Any:
    """Returns what a tensor would be without rounding, None where it is not known."""
    source = getattr(x, SOURCE, None)
    if source is None:
        return getattr(x, _ORIGIN).value()
    if isinstance(source, tf.Tensor) and _is_known(source):
        further = _exact(source)
        return source if further is None else further
    return source


def _exact_args(
    args: tuple[Any, ...], adapt: Callable[[tf.Tensor, Any], Any]
) -> tuple[Any, ...] | None:
    """Returns arguments with exact tensors, None where one cannot be made.

    `adapt` is given each floating-point tensor and its exact value.
    """
    missing = False

    def exact(x: Any) -> Any:
        nonlocal missing
        if not isinstance(x, tf.Tensor) or not x.dtype.is_floating:
            return x
        value = _exact(x) if _is_known(x) else x
        missing = missing or value is None
        return None if value is None else adapt(x, value)

    with replaced(CALLS, stack=[]):
        given = tuple(
            [exact(x) for x in each] if isinstance(each, list | tuple) else exact(each)
            for each in args
        )
    return None if missing else given


def _as_it_is(_: tf.Tensor, exact: Any) -> Any:
    return tf.convert_to_tensor(exact)


def _wide(_: tf.Tensor, exact: Any) -> Any:
    return tf.cast(exact, tf.float32)


def _of_the_same_kind(x: tf.Tensor, exact: Any) -> Any:
    """Returns the exact value, but 0 and infinity where rounding has come to them.

    A comparison guards against what the values used are, such as a division by 0.
    """
    wide = tf.cast(x, tf.float32)
    exact = tf.cast(exact, tf.float32)
    if exact is wide:
        return wide
    return tf.where((wide == 0) | tf.math.is_inf(wide), wide, exact)
