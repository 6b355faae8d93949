"""One step across all replicas: judge the gradients, then apply, add up or skip.

Everything here runs in the cross-replica context, on gradients that are reduced
already, so all replicas go the same way and nothing is written before it is
decided. Where a strategy cannot merge its replicas (on GPUs under XLA) it runs on
each of them alike.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.loss_scale.branches import either, first_of, stop_if_due
from tfamp.loss_scale.gradients import sums_of_squares
from tfamp.loss_scale.outcomes import after_finite, after_non_finite, applied
from tfamp.loss_scale.tally import Snapshot
from tfamp.loss_scale.update import apply_update
from tfamp.loss_scale.window import add_up, close_if_full


def take_step(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    come_scaled: bool,
    weight: Any,
    was_finite: Any = None,
) -> None:
    """Judges reduced gradients and does what the verdict asks for.

    Args:
        strategy: The strategy whose cross-replica context this is.
        optimizer: The `LossScaleOptimizer`.
        gradients: For each variable its gradient, summed over the replicas, or
            None. Values of all replicas, equal on all.
        variables: The trainable variables.
        come_scaled: Whether the gradients are multiplied by the loss scale.
        weight: Weight of this microbatch in its window, where steps are
            accumulated; a float32 scalar.
        was_finite: Whether the gradients were finite on all replicas as the tape gave
            them, where they were changed since: clipping by value hides an overflow. A
            boolean scalar, or None.
    """
    tally = optimizer.tally
    before = tally.read()
    scale = before.scale if come_scaled else tf.constant(1.0)
    judged = [
        (position, first_of(strategy, gradient))
        for position, (gradient, variable) in enumerate(
            zip(gradients, variables, strict=True)
        )
        if gradient is not None and not optimizer.is_overwritten(variable)
    ]
    squares = sums_of_squares([g for _, g in judged]) if judged else tf.zeros([1])
    is_finite = tf.math.is_finite(tf.reduce_sum(squares))
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None and optimizer.is_overwritten(variable):
            exact = tf.math.is_finite(first_of(strategy, gradient))
            is_finite = is_finite & tf.reduce_all(exact)
    if was_finite is not None:
        is_finite = is_finite & (was_finite | _is_lowest(optimizer, before))
    norm = tf.sqrt(tf.reduce_sum(squares)) / scale

    def go_on() -> None:
        values = after_finite(optimizer, before, norm, [g for _, g in judged], scale)
        if optimizer.accumulates:
            add_up(strategy, optimizer, gradients, variables, weight / scale)
            close_if_full(strategy, optimizer, gradients, variables, values, weight)
            return
        apply_update(strategy, optimizer, gradients, variables, 1 / scale, norm)
        tally.write(applied(values))

    def skip() -> None:
        tally.write(after_non_finite(optimizer, before, norm))
        optimizer.blame.note([variables[position] for position, _ in judged], squares)
        stop_if_due(optimizer)

    # Before the branches, one of which may end in an error.
    tally.remember(before.counters, before.scale, norm, ~is_finite)
    either(is_finite, go_on, skip)


def _is_lowest(optimizer: Any, before: Snapshot) -> tf.Tensor:
    """Returns whether a lower scale is no remedy for gradients that were not finite.

    Whoever makes them finite at a scale of 1 does so in float32 too.
    """
    lowest = max(1.0, optimizer.rule.min_scale)
    return optimizer.dynamic & (before.scale <= lowest)
