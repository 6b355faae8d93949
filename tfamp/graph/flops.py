"""Counts the floating-point operations of matrix products and convolutions."""

import dataclasses
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.operations import read_operations
from tfamp.graph.products import flops_of, is_product


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """What was counted, and what could not be.

    Args:
        flops: Floating-point operations, two for a multiply-add.
        uncounted: Names of products and convolutions whose shapes or number of runs
            the graph does not tell. One without shapes counts 0, one in a loop that
            data end counts once.
    """

    flops: int
    uncounted: tuple[str, ...] = ()


def count_flops(concrete: Any) -> FlopCount:
    """Returns the floating-point operations of one call of a traced function.

    Args:
        concrete: What `tf.function(...).get_concrete_function(...)` returned.

    Example:
        >>> matmul = tf.function(lambda x: tf.matmul(x, x))
        >>> traced = matmul.get_concrete_function(tf.TensorSpec((2, 2)))
        >>> count_flops(traced).flops
        16
    """
    total, uncounted = 0, []
    for operation in read_operations(concrete):
        if not is_product(operation):
            continue
        flops = flops_of(operation)
        total += (flops or 0) * operation.count
        if flops is None or not operation.is_counted:
            uncounted.append(operation.name)
    return FlopCount(total, tuple(uncounted))


def forward_flops(model: keras.layers.Layer, batch: Any) -> int:
    """Returns the floating-point operations of one forward pass in training mode.

    Matrix products and convolutions count, two for a multiply-add. A training step
    takes about three times as many. The model is traced once, which takes as long as
    the first step of `fit` without compiling, and no step is run.

    Args:
        model: A Keras model or layer. One that is not built is built, as by a call.
        batch: One batch of inputs, without targets, as the model takes them: arrays,
            tensors, or `tf.TensorSpec`s with the size of the batch.

    Returns:
        The number for the whole batch. A loop that data end counts once, and a
        warning says so.

    Example:
        >>> forward_flops(keras.layers.Dense(4), tf.zeros((8, 2)))  # 2 * 8 * 2 * 4
        128
    """

    @tf.function
    def forward(x: Any) -> Any:
        return model(x, training=True)

    counted = count_flops(
        forward.get_concrete_function(tf.nest.map_structure(_spec, batch))
    )
    if counted.uncounted:
        warnings.warn(
            f"The FLOPs of {len(counted.uncounted)} operations of {model.name!r} are "
            f"not known, the first is {counted.uncounted[0]!r}: their shapes or the "
            "number of times their loop runs depend on data. Each counts at most once, "
            "so the true number is higher.",
            stacklevel=2,
        )
    return counted.flops


def _spec(x: Any) -> Any:
    """Returns the shape and dtype of what a batch holds."""
    if isinstance(x, tf.TypeSpec):
        return x
    if isinstance(x, tf.Tensor) or not tf.is_tensor(x):
        tensor = tf.convert_to_tensor(x)
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    return tf.type_spec_from_value(x)
