"""One step across all replicas: judge the gradients, then apply, add up or skip.

Everything here runs in the cross-replica context, on gradients that are reduced
already, so all replicas go the same way and nothing is written before it is
decided. Where a strategy cannot merge its replicas (on GPUs under XLA) it runs on
each of them alike.
"""

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
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.replicas import either, first_of, on_each_replica, stop_if_due
from tfamp.loss_scale.rule import (
    EMPTY_WINDOW,
    ScaleState,
    select,
)


def flush(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Applies the microbatches of a window that is not full, if there are any."""
    before = optimizer.scale_variables.read()
    either(
        before.microbatches > 0,
        lambda: _close(strategy, optimizer, [], [], before),
        lambda: None,
    )


def discard(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Forgets the microbatches of a window that is not full."""
    before = optimizer.scale_variables.read()
    _empty(strategy, optimizer)
    optimizer.scale_variables.write(before._replace(**EMPTY_WINDOW))


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

    given = _keys_of_present(optimizer, gradients, variables)
    flags = [optimizer.key_of(v) in given for v in optimizer.accumulated_variables]
    optimizer.has_gradient.assign(_flags(optimizer) | tf.constant(flags))
    on_each_replica(strategy, add, gradients)


def close_if_full(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    values: ScaleState,
    weight: Any,
) -> None:
    """Counts a microbatch, and makes an update where it completes the window."""
    values = values._replace(
        microbatches=values.microbatches + 1, weight=values.weight + weight
    )
    either(
        values.microbatches >= optimizer.accumulation_steps,
        lambda: _close(strategy, optimizer, gradients, variables, values),
        lambda: optimizer.scale_variables.write(values),
    )


def _close(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    values: ScaleState,
) -> None:
    """Makes an update of the mean of a window's microbatches and begins a new one.

    `gradients` and `variables` are those of the call that completes the window, if any.
    """
    weight = values.weight
    judged = [
        v for v in optimizer.accumulated_variables if not optimizer.is_overwritten(v)
    ]
    squares = sums_of_squares(
        [first_of(strategy, optimizer.accumulator(v).value) for v in judged]
    )
    total = tf.reduce_sum(squares)
    norm = tf.sqrt(total) / weight

    def update() -> None:
        _apply_window(strategy, optimizer, gradients, variables, 1 / weight, norm)
        done = _applied(values._replace(norm=norm, finite_norm=norm))
        optimizer.scale_variables.write(done._replace(**EMPTY_WINDOW))
        _empty(strategy, optimizer)

    def drop() -> None:  # finite parts whose sum is not
        # The last microbatch was counted, and stands among the recent steps as good.
        count = values.judged - 1
        optimizer.scale_variables.remember(count, values.scale, norm, True)
        # Its microbatches ended the streak of steps; windows in a row make their own.
        before = values._replace(judged=count, streak=values.dropped)
        after = optimizer.rule.after_non_finite(before, select)
        after = after._replace(norm=norm, dropped=after.streak)
        optimizer.scale_variables.write(after._replace(**EMPTY_WINDOW))
        optimizer.nonfinite.note(judged, squares)
        _empty(strategy, optimizer)
        stop_if_due(optimizer)

    either(tf.math.is_finite(total), update, drop)


def _apply_window(
    strategy: tf.distribute.Strategy,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    factor: tf.Tensor,
    norm: tf.Tensor,
) -> None:
    """Applies what a window has added up, to no other variables than it was for.

    Which those are is known of the present call alone while a graph is traced; what
    earlier calls have trained is told by flags.
    """
    flags = _flags(optimizer)
    given = _keys_of_present(optimizer, gradients, variables)
    rest = {
        optimizer.key_of(v): flags[i]
        for i, v in enumerate(optimizer.accumulated_variables)
        if optimizer.key_of(v) not in given
    }

    def apply(chosen: Sequence[Any], conditions: dict[Any, tf.Tensor]) -> None:
        trained = {*given, *conditions}
        totals = [
            optimizer.accumulator(v).value if optimizer.key_of(v) in trained else None
            for v in chosen
        ]
        _apply_update(strategy, optimizer, totals, chosen, factor, norm, conditions)

    def with_rest() -> None:
        everything = optimizer.accumulated_variables
        if not tf.executing_eagerly():
            apply(everything, rest)
            return
        marked = {key: flag for key, flag in rest.items() if flag}
        keys = {*given, *marked}
        apply([v for v in everything if optimizer.key_of(v) in keys], marked)

    if not rest:
        apply(variables, {})
    elif not given:
        with_rest()
    else:
        is_any = tf.reduce_any(tf.stack(list(rest.values())))
        either(is_any, with_rest, lambda: apply(variables, {}))


def _apply_update(
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


def _applied(values: ScaleState) -> ScaleState:
    """Returns the values after an update."""
    return values._replace(applied=values.applied + 1, dropped=0)


def _keys_of_present(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> set[Any]:
    return {
        optimizer.key_of(variable)
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None
    }


def _flags(optimizer: Any) -> tf.Tensor:
    """Returns for each variable whether the window has a gradient of it."""
    return tf.convert_to_tensor(optimizer.has_gradient.value)


def _empty(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    def reset(_: Any) -> None:
        for variable in optimizer.accumulated_variables:
            total = optimizer.accumulator(variable).value
            total.assign(tf.zeros(total.shape, total.dtype))

    optimizer.has_gradient.assign(tf.zeros_like(_flags(optimizer)))
    on_each_replica(strategy, reset)


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
    """Judges reduced gradients, across replicas, and applies, adds up or skips.

    `gradients` are sums over the replicas, equal on all, or None, and `come_scaled`
    says whether they are multiplied by the loss scale. `weight` is that of this
    microbatch in its window, a float32 scalar. `was_finite`, a boolean scalar or None,
    tells whether the gradients were finite on all replicas as the tape gave them, where
    they were changed since: clipping by value hides an overflow.
    """
    stored = optimizer.scale_variables
    before = stored.read()
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
        # At a scale of 1 a lower one is no remedy: whoever makes gradients finite there
        # does so in float32 too.
        lowest = max(1.0, optimizer.rule.min_scale)
        is_lowest = optimizer.dynamic & (before.scale <= lowest)
        is_finite = is_finite & (was_finite | is_lowest)
    norm = tf.sqrt(tf.reduce_sum(squares)) / scale

    def go_on() -> None:
        values = optimizer.rule.after_finite(before, select)
        values = values._replace(norm=norm, finite_norm=norm)
        if optimizer.accumulates:
            add_up(strategy, optimizer, gradients, variables, weight / scale)
            close_if_full(strategy, optimizer, gradients, variables, values, weight)
            return
        _apply_update(strategy, optimizer, gradients, variables, 1 / scale, norm)
        stored.write(_applied(values))

    def skip() -> None:
        after = optimizer.rule.after_non_finite(before, select)
        stored.write(after._replace(norm=norm))
        optimizer.nonfinite.note(
            [variables[position] for position, _ in judged], squares
        )
        stop_if_due(optimizer)

    # Before the branches, one of which may end in an error.
    stored.remember(before.judged, before.scale, norm, ~is_finite)
    either(is_finite, go_on, skip)
