"""Accumulation: microbatches are added up in float32 and applied as their mean."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.loss_scale.branches import (
    either,
    first_of,
    on_each_replica,
    stop_if_due,
)
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.outcomes import after_non_finite, applied, with_empty_window
from tfamp.loss_scale.tally import Snapshot
from tfamp.loss_scale.update import apply_update


def flush(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Applies the microbatches of a window that is not full, if there are any."""
    before = optimizer.tally.read()
    either(
        before.counters.microbatches > 0,
        lambda: _close(strategy, optimizer, optimizer.accumulated_variables, before),
        lambda: None,
    )


def discard(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Forgets the microbatches of a window that is not full."""
    before = optimizer.tally.read()
    _empty(strategy, optimizer)
    optimizer.tally.write(with_empty_window(before))


def add_up(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Any,
    variables: Sequence[Any],
    factor: tf.Tensor,
) -> None:
    """Adds gradients times `factor` to the accumulators, in float32."""

    def add(gradients: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            total = optimizer.accumulator(variable).value
            if optimizer.is_overwritten(variable):
                total.assign(tf.maximum(total, tf.cast(gradient, total.dtype)))
                continue
            part = multiplied(gradient, factor)
            if isinstance(part, tf.IndexedSlices):
                total.scatter_add(part)
            else:
                total.assign_add(tf.cast(part, total.dtype))

    optimizer.has_gradient.update(
        optimizer.key_of(variable)
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None
    )
    on_each_replica(strategy, add, gradients)


def close_if_full(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    variables: Sequence[Any],
    values: Snapshot,
    weight: Any,
) -> None:
    """Counts a microbatch, and makes an update where it completes the window."""
    counters, levels = values.counters, values.levels
    values = values._replace(
        counters=counters._replace(microbatches=counters.microbatches + 1),
        levels=levels._replace(weight=levels.weight + weight),
    )
    either(
        values.counters.microbatches >= optimizer.accumulation_steps,
        lambda: _close(strategy, optimizer, variables, values),
        lambda: optimizer.tally.write(values),
    )


def _close(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    variables: Sequence[Any],
    values: Snapshot,
) -> None:
    """Makes an update of the mean of a window's microbatches and begins a new one."""
    weight = values.levels.weight
    sums = [
        first_of(strategy, optimizer.accumulator(variable).value)
        for variable in variables
        if not optimizer.is_overwritten(variable)
    ]
    total = tf.reduce_sum(sums_of_squares(sums))
    norm = tf.sqrt(total) / weight

    def update() -> None:
        held = [
            optimizer.accumulator(variable).value
            if optimizer.key_of(variable) in optimizer.has_gradient
            else None
            for variable in variables
        ]
        apply_update(strategy, optimizer, held, variables, 1 / weight, norm)
        levels = values.levels._replace(norm=norm, finite_norm=norm)
        done = applied(values._replace(levels=levels))
        optimizer.tally.write(with_empty_window(done))
        _empty(strategy, optimizer)

    def drop() -> None:  # finite parts whose sum is not
        # The last microbatch was counted, and stands among the recent steps as good.
        last = values.counters._replace(judged=values.counters.judged - 1)
        optimizer.tally.remember(last, values.levels.good_scale, norm, True)
        after = after_non_finite(optimizer, values._replace(counters=last), norm)
        optimizer.tally.write(with_empty_window(after))
        _empty(strategy, optimizer)
        stop_if_due(optimizer)

    either(tf.math.is_finite(total), update, drop)


def _empty(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    def reset(_: Any) -> None:
        for variable in optimizer.accumulated_variables:
            total = optimizer.accumulator(variable).value
            total.assign(tf.zeros(total.shape, total.dtype))

    on_each_replica(strategy, reset)
