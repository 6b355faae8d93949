"""Operations that half precision spoils, computed in float32 wherever they are written.

`OPERATIONS` is the table. An operation of TensorFlow is replaced inside of its public
function, where that can be: `tf.nn.softmax`, `tf.math.softmax`, a name imported ahead
and what Keras builds on it all end there. What Keras computes by formulas of its own is
replaced in its backend. Losses and activity regularizers are given float32, too, and
operators in code outside of layers where the other operand is float32; variables add to
themselves as they are stored.

Relies on: TensorFlow's decorators holding what they call in a closure; layers,
activations and `keras.ops` looking up functions of the backend as attributes of its
modules; losses recovering logits from the `_keras_logits` attribute of a prediction,
which the cast in `Loss.__call__` loses; `Layer.__call__` reading
`self.activity_regularizer` while a call context is open; operators of TensorFlow asking
`maybe_promote_tensors` for their operands; `assign_add` of a Keras variable reading it
within the autocast scope.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import ops as keras_operations
from tensorflow.python.framework import override_binary_operator as operators

from tfamp.keras_hooks import backend, calls, structure
from tfamp.keras_hooks.backend import HALF, operations
from tfamp.keras_hooks.exact_values import cast_outputs, widened
from tfamp.keras_hooks.layers import CALLS, Kind, policy_of
from tfamp.keras_hooks.patches import Function, InnerPatch, Patch, like, wrapper
from tfamp.keras_hooks.structure import Layer, map_structure

# By subject: what half precision does to them, and where operations are looked up.
OPERATIONS: dict[str, tuple[str, dict[Any, str]]] = {
    "softmax and sigmoid": (
        "probabilities near 0 vanish in half precision, and those near 1 round to 1",
        {tf.nn: "softmax log_softmax sigmoid"},
    ),
    "norms, variances and means": (
        "a float16 square overflows at 256 and is 0 below 2e-4, and the sum on the way "
        "to a mean overflows at 65504",
        {
            tf: "norm reduce_mean clip_by_norm",
            tf.nn: "l2_normalize",
            tf.math: "reduce_variance reduce_std reduce_euclidean_norm",
            tf.linalg: "normalize",
            operations.nn: "moments psnr squareplus",
            operations.math: "cdist",
            operations.linalg: "norm",
            operations.numpy: "average corrcoef nanmean nanvar nanstd",
            keras_operations.nn: "_normalize",
        },
    ),
    "long sums": (
        "a running sum of ones, and one by segments, stops at 2048 in float16 and at "
        "256 in bfloat16",
        {
            tf: "cumsum scatter_nd tensor_scatter_nd_add",
            tf.math: "reduce_logsumexp cumulative_logsumexp cumprod segment_sum "
            "segment_mean unsorted_segment_sum unsorted_segment_mean "
            "unsorted_segment_sqrt_n",
        },
    ),
    "cross-entropies": (
        "1 - 1e-7 rounds to 1 in half precision, so a probability of 1 costs infinity",
        {
            operations.nn: "binary_crossentropy categorical_crossentropy "
            "sparse_categorical_crossentropy"
        },
    ),
}
_EXACT = "_tfamp_exact"  # marks what an operation of the table has made
_REGULARIZER = "activity_regularizer"


def patches() -> list[Patch]:
    """Returns the patches on operations, losses and activity regularizers."""
    return [
        *(
            InnerPatch(module, name, _in_float32)
            for _, modules in OPERATIONS.values()
            for module, names in modules.items()
            for name in names.split()
            if hasattr(module, name)  # not in every version of Keras
        ),
        Patch(keras.Loss, "__call__", _wrap_loss),
        Patch(backend.KerasVariable, "assign_add", _as_stored),
        Patch(backend.KerasVariable, "assign_sub", _as_stored),
        Patch(operators, "maybe_promote_tensors", _wrap_operands),
        Patch(
            Layer,
            _REGULARIZER,
            lambda _: property(_read_regularizer, _write_regularizer),
            optional=True,
        ),
    ]


@wrapper
def _as_stored(original: Function, self: Any, value: Any) -> Any:
    """Adds to a variable, whose layer reads it in half precision: a count of 256."""
    policy = CALLS.stack[-1] if CALLS.stack else None
    if policy is None or not policy.settings.has_defaults:
        return original(self, value)
    with backend.global_attributes(autocast_scope=None):
        return original(self, value)


def _in_float32(original: Function) -> Function:
    @like(original)
    def operation(*args: Any, **kwargs: Any) -> Any:
        policy = CALLS.stack[-1] if CALLS.stack else None
        if (
            policy is None
            or policy.kind is Kind.EXPLICIT
            or not policy.settings.has_defaults
        ):
            return original(*args, **kwargs)
        given = map_structure(_read, (args, kwargs))
        dtypes = {x.dtype for x in structure.flatten(given) if _is_float(x)}
        if len(dtypes) != 1 or not dtypes <= {*HALF}:
            return original(*args, **kwargs)
        args, kwargs = map_structure(_widened, given)
        dtype = tf.float32 if policy.kind is Kind.WIDE_OUTPUT else dtypes.pop()
        return map_structure(lambda y: _exact(y, dtype), original(*args, **kwargs))

    return operation


def _is_float(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and bool(x.dtype.is_floating)


def _read(x: Any) -> Any:
    """Returns the value of a variable, in the dtype that its layer reads it in."""
    return tf.convert_to_tensor(x) if isinstance(x, keras.Variable) else x


def _widened(x: Any) -> Any:
    """Returns a half-precision tensor in float32, and anything else as it is."""
    return backend.cast(x, "float32") if _is_float(x) and x.dtype in HALF else x


def _exact(y: Any, dtype: tf.DType) -> Any:
    if not _is_float(y):
        return y
    z = backend.cast(y, dtype)
    setattr(z, _EXACT, True)
    return z


@wrapper
def _wrap_loss(
    original: Function, self: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any
) -> Any:
    """Widens predictions that a managed layer made, with their logits and mask."""

    def widened(x: Any) -> Any:
        return cast_outputs(x, "float32") if hasattr(x, _EXACT) else x

    return original(self, y_true, map_structure(widened, y_pred), *args, **kwargs)


@wrapper
def _wrap_operands(original: Function, *operands: Any, **how: Any) -> Any:
    """Widens what a layer gave a loop, beside what a model gave it, or a target."""
    if CALLS.has_given_half and not CALLS.stack:
        dtypes = {getattr(x, "dtype", None) for x in operands}
        if tf.float32 in dtypes and not dtypes.isdisjoint(HALF):
            operands = tuple(map(widened, operands))
    return original(*operands, **how)


class _InFloat32:
    """A regularizer, called on the float32 value of what it is given."""

    def __init__(self, regularizer: Callable[[Any], Any]) -> None:
        self._regularizer = regularizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._regularizer, name)

    def __call__(self, x: Any) -> Any:
        return self._regularizer(backend.cast(x, "float32"))


def _read_regularizer(layer: Layer) -> Any:
    """Returns a regularizer that sees float32 in calls, and is as ever outside."""
    if _REGULARIZER not in vars(layer):
        raise AttributeError(_REGULARIZER)
    regularizer = vars(layer)[_REGULARIZER]
    if regularizer is None or policy_of(layer) is None or not calls.in_call():
        return regularizer
    return _InFloat32(regularizer)


def _write_regularizer(layer: Layer, value: Any) -> None:
    vars(layer)[_REGULARIZER] = value
