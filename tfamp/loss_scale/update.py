"""One update by the inner optimizer, on gradients that are reduced already."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.optimizers import (
    around_each_variable,
    leaves,
    on_reduced_gradients,
)
from tfamp.keras_hooks.variables import writes_only_if
from tfamp.loss_scale.branches import on_each_replica
from tfamp.loss_scale.gradients import multiplied


def apply_update(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Any,
    variables: Sequence[Any],
    factor: tf.Tensor,
    norm: tf.Tensor,
    conditions: Mapping[Any, tf.Tensor] | None = None,
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
        conditions: Boolean scalars, by what a variable is told apart by, for those
            that may have to stay as they are.
    """
    conditions = conditions or {}
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
            elif gradient is not None and optimizer.key_of(variable) in conditions:
                is_due = conditions[optimizer.key_of(variable)]
                gradient = tf.where(is_due, gradient, tf.cast(variable, gradient.dtype))
            unscaled.append(gradient)
        optimizer.update_inner(unscaled, variables)

    def where_due(variable: Any) -> contextlib.AbstractContextManager[None]:
        condition = conditions.get(optimizer.key_of(variable))
        if condition is None or tf.executing_eagerly():
            return contextlib.nullcontext()
        return writes_only_if(condition)

    inner = optimizer.inner_optimizer
    with (
        on_reduced_gradients(inner, clips=limit is None),
        around_each_variable(leaves(inner) if conditions else [], where_due),
    ):
        on_each_replica(strategy, update, gradients)
