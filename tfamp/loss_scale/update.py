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
from tfamp.loss_scale.counters import Snapshot, select
from tfamp.loss_scale.gradients import largest_magnitude, multiplied
from tfamp.loss_scale.replicas import on_each_replica
from tfamp.loss_scale.rule import MEASURED_TARGET, PROBE_GROWTH

_FRACTION_BITS = 23  # of a float32


def after_finite(
    optimizer: Any, before: Snapshot, norm: tf.Tensor, gradients: Any, scale: tf.Tensor
) -> Snapshot:
    """Returns the values after a step whose gradients were finite."""
    values = before.with_state(optimizer.rule.after_finite(before.state, select))
    if optimizer.measures_scale:
        values = _measured(optimizer, values, before, gradients, scale)
    judged = values.counters.judged + 1
    return values._replace(
        counters=values.counters._replace(judged=judged),
        levels=values.levels._replace(norm=norm, finite_norm=norm),
    )


def after_non_finite(optimizer: Any, before: Snapshot, norm: tf.Tensor) -> Snapshot:
    """Returns the values after a step that is skipped."""
    values = before.with_state(optimizer.rule.after_non_finite(before.state, select))
    counters = values.counters
    return values._replace(
        counters=counters._replace(
            judged=counters.judged + 1, skipped=counters.skipped + 1
        ),
        levels=values.levels._replace(norm=norm),
    )


def after_dropped(optimizer: Any, before: Snapshot, norm: tf.Tensor) -> Snapshot:
    """Returns the values after a window whose parts were finite and whose sum was not.

    Its microbatches ended the streak of steps; windows in a row make one of their own.
    """
    streak = before.counters.dropped
    values = before._replace(counters=before.counters._replace(streak=streak))
    values = after_non_finite(optimizer, values, norm)
    counters = values.counters
    return values._replace(counters=counters._replace(dropped=counters.streak))


def applied(values: Snapshot) -> Snapshot:
    """Returns the values after an update."""
    counters = values.counters
    return values._replace(
        counters=counters._replace(applied=counters.applied + 1, dropped=0)
    )


def with_empty_window(values: Snapshot) -> Snapshot:
    """Returns the values at the start of a new window of microbatches."""
    return values._replace(
        counters=values.counters._replace(microbatches=0),
        levels=values.levels._replace(weight=0.0),
    )


def _measured(
    optimizer: Any, values: Snapshot, before: Snapshot, gradients: Any, scale: tf.Tensor
) -> Snapshot:
    """Sets the scale by the first finite gradients, once; as `measured_scale`."""
    rule = optimizer.rule

    def measure() -> tuple[tf.Tensor, tf.Tensor]:
        largest = largest_magnitude(gradients) / scale
        power = _power_of_two_below(MEASURED_TARGET / largest)
        is_zero = tf.equal(largest, 0)
        wanted = tf.where(is_zero, before.scale * PROBE_GROWTH, power)
        bounded = tf.clip_by_value(wanted, rule.min_scale, rule.max_scale)
        return bounded, tf.cast(is_zero, tf.int64)

    new_scale, is_probing = tf.cond(
        before.counters.is_probing > 0,
        measure,
        lambda: (values.scale, before.counters.is_probing),
    )
    counters = values.counters._replace(is_probing=is_probing)
    return values._replace(scale=new_scale, counters=counters)


def _power_of_two_below(x: tf.Tensor) -> tf.Tensor:
    """Clears the fraction of a positive float32: exact, unlike a logarithm."""
    limited = tf.minimum(x, 2.0**100)
    bits = tf.bitcast(limited, tf.int32)
    exponent = tf.bitwise.right_shift(bits, _FRACTION_BITS)
    return tf.bitcast(tf.bitwise.left_shift(exponent, _FRACTION_BITS), tf.float32)


def apply_update(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Any,
    variables: Sequence[Any],
    factor: tf.Tensor,
    norm: tf.Tensor,
    conditions: Mapping[Any, tf.Tensor] | None = None,
) -> None:
    """Lets the inner optimizer make an update of `gradients` times a float32 `factor`.

    A gradient is a tensor, `tf.IndexedSlices`, an accumulator or None, of all replicas
    and equal on all; `norm` is theirs after the multiplication. `conditions` has
    boolean scalars, by the keys of those variables that may have to stay as they are.
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
