"""What operations of a layer's own code do with numbers that half precision rounds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.keras_hooks.backend import HALF

_MASK = -1e8
_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")
_ANGLES = ("Sin", "Cos")


def is_lost(value: Any, dtype: tf.DType) -> bool:
    """Returns whether rounding makes 0, 1 or infinity of what is something else."""
    held = np.asarray(value)
    if held.dtype.kind not in "fiu" or not held.size:
        return False
    held = held.astype("float64")
    with np.errstate(over="ignore", under="ignore"):
        rounded = held.astype(dtype.as_numpy_dtype).astype("float64")
    is_round = np.isinf(rounded) | (rounded == 0) | (np.abs(rounded) == 1)
    return bool(np.any(is_round & (rounded != held)))


def is_used(constant: tf.Tensor, least: float) -> bool:
    """Returns whether more hangs on a lost number than a factor, which shows itself.

    One of -1e8 or less is a mask, and one that rounds to 1 is a share of something.
    """
    is_special = least <= _MASK or 0.5 < abs(least) < 2.0
    factors = {"RealDiv"} if is_special else {"RealDiv", "Mul"}
    return any(operation.type not in factors for operation in constant.consumers())


def lost_by_cast(operation: tf.Operation) -> tuple[tf.Tensor, float] | None:
    """Returns what an operation casts to half precision, if it is a lost constant."""
    if operation.type != "Cast" or operation.outputs[0].dtype not in HALF:
        return None
    made_by, cast = operation.inputs[0].op, operation.outputs[0]
    if made_by.type != "Const":
        return None
    value = tf.make_ndarray(made_by.get_attr("value"))
    return (cast, float(np.min(value))) if is_lost(value, cast.dtype) else None


def calls_python(operation: tf.Operation) -> bool:
    """Returns whether an operation hands half precision to a Python function."""
    return operation.type in _PYTHON and any(x.dtype in HALF for x in operation.inputs)


def makes_whole(operation: tf.Operation) -> bool:
    """Returns whether an operation makes whole numbers, such as places, of half."""
    return _casts_half(operation) and bool(operation.outputs[0].dtype.is_integer)


def takes_angles(operations: Sequence[tf.Operation], given: set[int]) -> bool:
    """Returns whether sines are taken of half, or of what code widens of its inputs.

    `given` are the `id`s of what the layer is given.
    """

    def widens(operation: tf.Operation) -> bool:
        if not _casts_half(operation) or operation.outputs[0].dtype != tf.float32:
            return False
        half = operation.inputs[0]
        from_keras = half.op.inputs if half.op.type == "Cast" else ()
        return any(id(each) in given for each in (half, *from_keras))

    dtypes = {each.outputs[0].dtype for each in operations if each.type in _ANGLES}
    return not dtypes.isdisjoint(HALF) or (
        bool(dtypes) and any(map(widens, operations))
    )


def _casts_half(operation: tf.Operation) -> bool:
    return operation.type == "Cast" and operation.inputs[0].dtype in HALF
