"""Inputs for trying an export: the user's own, or some that its signature allows."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.serving.exports.tracing import Traced
from tfamp.serving.runtimes.signature import dtype_named, has_shape
from tfamp.stepping.arguments import dataset_of

# More tell a quantiser next to nothing about ranges.
MAX_CALIBRATION_EXAMPLES = 512
_BATCH = 32
_NUM_TRIED = 5
# Where a dimension is free and nobody says what it is.
_FREE = 8


def first_inputs(*data: Any) -> Any:
    """Returns the inputs of the first batch of the first data that are there."""
    for each in data:
        if each is not None:
            return _inputs(next(iter(_batches(each, "calibration"))))
    return None


def calibration_batches(
    data: Any, traced: Traced
) -> tuple[Mapping[str, np.ndarray], ...]:
    """Returns inputs by name, checked, at most `MAX_CALIBRATION_EXAMPLES` of them.

    Raises:
        ValueError: They have another shape or dtype than the model's, are empty, or
            hold NaN or infinities.
    """
    found, number = [], 0
    for batch in _batches(data, "calibration"):
        arrays = _checked(traced.by_name(_inputs(batch)), traced)
        found.append(arrays)
        number += len(next(iter(arrays.values())))
        if number >= MAX_CALIBRATION_EXAMPLES:
            break
    if not number:
        raise ValueError(
            "`calibration` holds no examples; expected some tens, as `predict` takes "
            "them. Pass a part of the training data."
        )
    return tuple(found)


def tried_inputs(traced: Traced, data: Any) -> dict[str, np.ndarray]:
    """Returns a few inputs by name with which an export is tried."""
    if data is not None:
        given = traced.by_name(data)
        return {name: value[:_NUM_TRIED] for name, value in given.items()}
    random = np.random.default_rng(0)
    found = {}
    for spec in traced.signature.inputs:
        shape = (_NUM_TRIED, *(_FREE if n is None else n for n in spec.shape[1:]))
        dtype = dtype_named(spec.dtype)
        if dtype.kind == "f":
            found[spec.name] = random.normal(size=shape).astype(dtype)
        elif dtype.kind == "O":
            found[spec.name] = np.full(shape, "a", object)
        else:
            found[spec.name] = random.integers(0, 2, shape).astype(dtype)
    return found


def _batches(data: Any, name: str) -> tf.data.Dataset:
    return dataset_of(data, _BATCH, needs_targets=False, name=name)


def _inputs(batch: Any) -> Any:
    x = batch[0] if isinstance(batch, tuple) else batch
    return tf.nest.map_structure(np.asarray, x)


def _checked(arrays: Mapping[str, Any], traced: Traced) -> dict[str, np.ndarray]:
    found = {}
    for spec in traced.signature.inputs:
        array = np.asarray(arrays[spec.name])
        dtype = dtype_named(spec.dtype)
        if not has_shape(array, spec.shape):
            raise ValueError(
                f"`calibration` has {spec.name!r} of shape {array.shape}; expected "
                f"{spec.shape}. Pass inputs as `predict` takes them."
            )
        if array.dtype.kind == "f":
            number = math.prod(array.shape) - int(np.isfinite(array).sum())
            if number:
                raise ValueError(
                    f"`calibration` has {number} numbers that are not finite in "
                    f"{spec.name!r}; expected none. Take these examples out."
                )
        found[spec.name] = array.astype(dtype, copy=False)
    return found
