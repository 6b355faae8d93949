"""How many examples one update takes, as the arguments of `fit` tell."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

_USUAL_BATCH = 32  # Keras's, where `fit` is given arrays and no size
# Stages of tf.data that hand batches on as they are.
_PASSING = frozenset(
    "Prefetch Map ParallelMap Options Cache CacheV2 Shuffle Repeat Take Skip Shard "
    "Model AssertCardinality Filter ParallelFilter MapAndFilter Rebalance Numbered "
    "Concatenate IgnoreErrors Snapshot Save Finalize".split()
)


def batch_size_of(arguments: Mapping[str, Any]) -> int | None:
    """Returns the examples in a batch of `fit`, None where that is not to be seen.

    Nothing is read: a dataset is asked for its shapes and its last stages.

    Args:
        arguments: Those of `fit`, by name.

    Example:
        >>> batch_size_of({"x": tf.zeros((100, 2))})
        32
        >>> data = tf.data.Dataset.range(100).batch(8).prefetch(2)
        >>> batch_size_of({"x": data})
        8
    """
    x = arguments.get("x")
    if isinstance(x, keras.utils.PyDataset):
        return None
    spec = getattr(x, "element_spec", None)
    if spec is not None:
        return _leading(spec) or _batched_by(x)
    length = _leading(x)
    if length is None:
        return None
    return min(length, arguments.get("batch_size") or _USUAL_BATCH)


def update_size_of(arguments: Mapping[str, Any], optimizer: Any) -> int | None:
    """Returns the examples of one update, None where that is not to be seen.

    Under a strategy `fit` splits what is a batch here among the replicas.

    Args:
        arguments: Those of `fit`, by name.
        optimizer: The model's optimizer.
    """
    batch_size = batch_size_of(arguments)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(optimizer, "accumulation_steps", None)
    steps = steps or getattr(inner, "gradient_accumulation_steps", None) or 1
    return None if batch_size is None else batch_size * int(steps)


def _leading(structure: Any) -> int | None:
    """Returns the first dimension of the first leaf, None where it has none."""
    for leaf in tf.nest.flatten(structure):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return None
        if len(shape):
            return None if shape[0] is None else int(shape[0])
    return None


def _batched_by(dataset: Any) -> int | None:
    """Returns the size that the last `batch` of a dataset was given."""
    while dataset is not None:
        name = type(dataset).__name__.strip("_").removesuffix("Dataset")
        size = getattr(dataset, "_batch_size", None)
        if name in ("Batch", "ParallelBatch") and size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        if name not in _PASSING:
            return None
        dataset = getattr(dataset, "_input_dataset", None)
    return None
