"""One update by the inner optimizer, on gradients that are reduced already."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.optimizers import on_reduced_gradients
from tfamp.loss_scale.branches import on_each_replica
from tfamp.loss_scale.gradients import multiplied


def apply_update(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Any,
    variables: Sequence[Any],
    factor: tf.Tensor,
    norm: tf.Tensor,
) -> None:
    """Lets the inner optimizer make an update of `gradients` times `factor`.

    Args:
        strategy: The strategy whose cross-replica context this is.
        optimizer: The `LossScaleOptimizer`.
        gradients: For each variable a tensor, `tf.IndexedSlices`, accumulator or
            None; values of all replicas, equal on all.
        variables: The trainable variables.
        factor: A float32 scalar.
        norm: Norm of the gradients after the multiplication.
    """
    limit = optimizer.shared_clip
    if limit is not None:
        factor = factor * (limit / tf.maximum(norm, limit))

    def update(gradients: Any) -> None:
        unscaled = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.Variable):  # an accumulator
                gradient = tf.convert_to_tensor(gradient)
            if gradient is not None and not optimizer.is_overwritten(variable):
                gradient = multiplied(gradient, factor)
            unscaled.append(gradient)
        optimizer.inner_optimizer.apply(unscaled, variables)

    inner = optimizer.inner_optimizer
    with on_reduced_gradients(inner, clips=limit is None):
        on_each_replica(strategy, update, gradients)
