"""The float32 model that exports are made from: its copy, and inputs to try."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure, trainer, variables
from tfamp.models import apply
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.serving.exports.tracing import Traced
from tfamp.serving.runtimes.signature import dtype_named, has_shape
from tfamp.stepping.unchanged import copied

Batch = Mapping[str, np.ndarray]
# More tell a quantizer next to nothing about ranges.
_MAX_CALIBRATION_EXAMPLES = 512
_NUM_TRIED = 5
# Fewer different examples than these are a mistake: one again and again, or a sample.
_MIN_DIFFERENT = 4
# Where a dimension is free and nobody says what it is.
_FREE = 8


def float32_copy(model: keras.Model) -> keras.Model:
    """Returns a copy that stores and computes everything in float32, not compiled.

    Exporters fail on casts to bfloat16, and write files that no runtime loads. What was
    rounded in a model in half precision stays rounded; its sums get more exact.
    """
    copy = copied(model, instead="export a model whose classes have one")
    own = {id(weight) for weight in model.weights}
    if own & {id(weight) for weight in copy.weights}:
        raise ValueError(
            f"Cannot copy model {model.name!r}: its copy holds weights of the "
            "original. Give its classes a `get_config` that returns their arguments."
        )
    if structure.compute_dtypes(copy) & {*HALF}:
        apply(copy, "float32")
    trainer.forget_training(copy)
    with copy.distribute_strategy.scope():
        for weight in copy.weights:
            if weight.dtype in HALF:
                variables.store_in(weight, "float32")
    graph = structure.graph_of(copy)
    if graph is not None:
        structure.widen_inputs(graph)
    trainer.drop_traced_functions(copy)
    return copy


def inputs_in(batch: Any) -> Any:
    """Returns the inputs of a batch as arrays."""
    x = batch[0] if isinstance(batch, tuple) else batch
    return tf.nest.map_structure(np.asarray, x)


def tried_inputs(traced: Traced, sample: Any) -> dict[str, np.ndarray]:
    """Returns a few inputs by name with which exports are tried, and the model was."""
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
    if sample is not None:
        given = _checked(traced.by_name(sample), traced, "validation")
        found = {
            spec.name: given[spec.in_file][:_NUM_TRIED]
            for spec in traced.signature.inputs
        }
    for size in (1, _NUM_TRIED):
        rows = {name: x[np.arange(size) % len(x)] for name, x in found.items()}
        try:
            traced.call(rows)
        except Exception as error:  # of whatever operation
            raise ValueError(
                f"The model does not answer a batch of {size}: {first_line(error)}. An "
                "export is asked for any number of examples: give inputs `shape=` in "
                "place of `batch_shape=`, let operations take the batch from "
                "`keras.ops.shape(x)[0]`, or pass inputs that it takes as "
                "`validation=`."
            ) from error
    return found


def calibration_batches(
    data: Iterable[Any], traced: Traced
) -> tuple[dict[str, np.ndarray], ...]:
    """Returns some hundreds of inputs by their names in files, in batches, checked."""
    found: list[dict[str, np.ndarray]] = []
    rows: list[bytes] = []
    for batch in data:
        arrays = _checked(traced.by_name(inputs_in(batch)), traced, "calibration")
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(
                    f"`calibration` has {int((~np.isfinite(array)).sum())} numbers "
                    f"that are not finite in {name!r}; expected none. Take these "
                    "examples out."
                )
        found.append(arrays)
        values = zip(*arrays.values(), strict=True)
        rows += [b"".join(np.asarray(x).tobytes() for x in row) for row in values]
        if len(rows) >= _MAX_CALIBRATION_EXAMPLES:
            break
    number = len({*rows})
    if not number:
        raise ValueError(
            "`calibration` holds no examples; expected some tens, as `predict` takes "
            "them. Pass a part of the training data."
        )
    if number < _MIN_DIFFERENT:
        warnings.warn(
            f"`calibration` holds {number} different example{'s' * (number > 1)} among "
            f"{len(rows)}: the ranges that integers get from so few cut off what lies "
            "outside in others. Pass some tens of different training examples.",
            stacklevel=checks.level_of_user(),
        )
    return tuple(found)


def _checked(
    arrays: Mapping[str, Any], traced: Traced, argument: str
) -> dict[str, np.ndarray]:
    """Returns inputs by their names in files, cast to what the model takes."""
    found = {}
    for spec in traced.signature.inputs:
        array = np.asarray(arrays[spec.name])
        if not has_shape(array, spec.shape):
            raise ValueError(
                f"`{argument}` has {spec.name!r} of shape {array.shape}; expected "
                f"{spec.shape}. Pass inputs as `predict` takes them."
            )
        found[spec.in_file] = array.astype(dtype_named(spec.dtype), copy=False)
    return found
