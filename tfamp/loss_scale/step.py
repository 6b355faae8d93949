"""One step: gradients summed over replicas, judged once, and applied, added up or not.

They are judged and applied in the cross-replica context, so all replicas go the same
way and nothing is written before it is decided. Where a strategy cannot merge its
replicas (on GPUs under XLA) each of them does it alike.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import replicas
from tfamp.keras_hooks.optimizers import (
    in_xla,
    leaves,
    on_reduced_gradients,
    strategy_of,
    trained_by,
    updating_only_if,
)
from tfamp.loss_scale.gradients import multiplied, reduced, sums_of_squares
from tfamp.loss_scale.replicas import (
    either,
    first_of,
    on_each_replica,
    where_replicas_are_one,
)
from tfamp.loss_scale.rule import EMPTY_WINDOW, ScaleState, select
from tfamp.loss_scale.scales import HERE, take_notes, verdict_on
from tfamp.loss_scale.stops import stop_if_due
from tfamp.records import checks

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10
_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def take(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Takes a step of all replicas, from inside of each."""
    notes = take_notes(variables)
    come_scaled = not optimizer.was_unscaled and all(n.is_by_hand for n in notes)
    optimizer.was_unscaled = False
    if come_scaled and not notes:
        _warn_of_unscaled_loss(optimizer)
    # Whether gradients were finite as the tape gave them, where they were changed
    # since: clipping by value hides an overflow.
    verdict, empty = verdict_on(notes, gradients), replicas.is_empty()
    if empty is not None:
        gradients = replicas.of_examples(gradients)
        verdict = None if verdict is None else verdict | empty
    is_known = verdict is not None
    num_spoilt = tf.constant(0.0)
    if verdict is not None:
        num_spoilt = tf.cast(~verdict, "float32")
    weight = tf.constant(1.0) if HERE.weight is None else HERE.weight
    gradients, (weight, num_spoilt) = reduced(
        optimizer.reduce_dtype,
        gradients,
        [None if optimizer.is_overwritten(v) else v for v in variables],
        [tf.convert_to_tensor(weight), num_spoilt],
        scale=None if come_scaled else optimizer.scale_variables.read().scale,
    )

    def merged(strategy: Any, gradients: Any, weight: Any, num_spoilt: Any) -> None:
        was_finite = tf.equal(first_of(strategy, num_spoilt), 0.0) if is_known else None
        step = _Step(strategy, optimizer, gradients, variables)
        step.judge(first_of(strategy, weight), was_finite, come_scaled=come_scaled)

    can_merge = not tf.__internal__.distribute.strategy_supports_no_merge_call()
    strategy = tf.distribute.get_strategy()
    if can_merge and strategy.num_replicas_in_sync > 1 and in_xla():
        raise RuntimeError(
            f"`jit_compile=True` under {type(strategy).__name__}: TensorFlow cannot "
            "compile a step of several replicas by XLA on these devices "
            "(keras#21366). Pass `jit_compile=False`."
        )
    where_replicas_are_one(merged, gradients, weight, num_spoilt)


@tf.autograph.experimental.do_not_convert
def on_window(take: Callable[..., None], optimizer: Any) -> None:
    """Has `flush` or `discard` do its work on all replicas of an optimizer."""
    if not (optimizer.built and optimizer.accumulates):
        return
    strategy, ours = tf.distribute.get_strategy(), strategy_of(optimizer)
    if tf.distribute.in_cross_replica_context():
        take(strategy, optimizer)
    elif strategy.num_replicas_in_sync > 1 or ours.num_replicas_in_sync == 1:
        where_replicas_are_one(take, optimizer)
    else:  # as a graph: on several replicas eager code is slow
        functions = vars(optimizer).setdefault("_window_functions", {})
        if take not in functions:
            call = functools.partial(take, ours, optimizer)
            functions[take] = tf.function(call, autograph=False)
        with ours.scope():
            functions[take]()


def flush(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Applies the microbatches of a window that is not full, if there are any."""
    before = optimizer.scale_variables.read()
    step = _Step(strategy, optimizer)
    either(before.microbatches > 0, lambda: step.close(before), lambda: None)


def discard(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Forgets the microbatches of a window that is not full."""
    before = optimizer.scale_variables.read()
    _Step(strategy, optimizer).empty()
    optimizer.scale_variables.write(before._replace(**EMPTY_WINDOW))


def _warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    has_no_scale = not optimizer.dynamic and optimizer.initial_scale == 1
    if optimizer.has_scaled_loss or has_no_scale:
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    is_sure = not tf.executing_eagerly() or count == _EAGER_STEPS
    if count > _EAGER_STEPS or not is_sure:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed. "
        f"{checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


class _Step:
    """A step across replicas.

    `gradients` are sums over them, equal on all, or None.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        optimizer: Any,
        gradients: Sequence[Any] = (),
        variables: Sequence[Any] = (),
    ) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self.stored = optimizer.scale_variables
        self.gradients, self.variables = gradients, variables
        self.given = [
            (gradient, variable)
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]

    def judge(self, weight: Any, was_finite: Any, *, come_scaled: bool) -> None:
        """Judges the gradients, and applies them, adds them up or skips the step.

        `weight` is that of this microbatch in its window, a float32 scalar.
        `was_finite`, a boolean scalar or None, tells whether the gradients were finite
        on all replicas before the user's code changed them; `come_scaled` whether they
        are multiplied by the loss scale.
        """
        optimizer, stored = self.optimizer, self.stored
        before = stored.read()
        scale = before.scale if come_scaled else tf.constant(1.0)
        present = [(first_of(self.strategy, g), v) for g, v in self.given]
        judged = [v for _, v in present if not optimizer.is_overwritten(v)]
        squares = sums_of_squares(
            [g for g, v in present if not optimizer.is_overwritten(v)]
            or [tf.zeros([1])]
        )
        is_finite = tf.math.is_finite(tf.reduce_sum(squares))
        for gradient, variable in present:
            if optimizer.is_overwritten(variable):
                is_finite = is_finite & tf.reduce_all(tf.math.is_finite(gradient))
        if was_finite is not None:
            # At a scale of 1 a lower one is no remedy: whoever makes gradients finite
            # there does so in float32 too.
            lowest = max(1.0, optimizer.rule.min_scale)
            is_lowest = optimizer.dynamic & (before.scale <= lowest)
            is_finite = is_finite & (was_finite | is_lowest)
        norm = tf.sqrt(tf.reduce_sum(squares)) / scale

        def go_on() -> None:
            after = optimizer.rule.after_finite(before, select)
            after = after._replace(norm=norm, finite_norm=norm)
            if optimizer.accumulates:
                self._add_up(weight / scale)
                self._close_if_full(after, weight)
                return
            self._apply(self.gradients, self.variables, 1 / scale, norm)
            stored.write(after._replace(applied=after.applied + 1, dropped=0))

        def skip() -> None:
            after = optimizer.rule.after_non_finite(before, select)
            stored.write(after._replace(norm=norm))
            self._blame(judged, squares)

        # Before the branches, one of which may end in an error.
        stored.remember(before.judged, before.scale, norm, ~is_finite)
        either(is_finite, go_on, skip)

    def _blame(self, variables: Sequence[Any], squares: tf.Tensor) -> None:
        self.stored.note(list(map(self.optimizer.position_of, variables)), squares)
        stop_if_due(self.optimizer)

    def _add_up(self, factor: tf.Tensor) -> None:
        """Adds gradients times `factor` to the accumulators, in float32."""
        optimizer = self.optimizer

        def add(gradients: Any) -> None:
            for gradient, variable in zip(gradients, self.variables, strict=True):
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

        given = {optimizer.position_of(v) for _, v in self.given}
        flags = [i in given for i in range(len(trained_by(optimizer)))]
        optimizer.has_gradient.assign(self._flags() | tf.constant(flags))
        on_each_replica(self.strategy, add, self.gradients)

    def _close_if_full(self, values: ScaleState, weight: Any) -> None:
        """Counts a microbatch, and makes an update where it completes the window."""
        values = values._replace(
            microbatches=values.microbatches + 1, weight=values.weight + weight
        )
        either(
            values.microbatches >= self.optimizer.accumulation_steps,
            lambda: self.close(values),
            lambda: self.stored.write(values),
        )

    def close(self, values: ScaleState) -> None:
        """Makes an update of the mean of a window's microbatches, and begins anew."""
        optimizer, stored = self.optimizer, self.stored
        everything = trained_by(optimizer)
        judged = [v for v in everything if not optimizer.is_overwritten(v)]
        totals = [
            first_of(self.strategy, optimizer.accumulator(v).value) for v in judged
        ]
        squares = sums_of_squares(totals)
        total = tf.reduce_sum(squares)
        norm = tf.sqrt(total) / values.weight

        def update() -> None:
            self._apply_window(1 / values.weight, norm)
            after = values._replace(norm=norm, finite_norm=norm, **EMPTY_WINDOW)
            stored.write(after._replace(applied=after.applied + 1, dropped=0))
            self.empty()

        def drop() -> None:  # finite parts whose sum is not
            # The last microbatch was counted, and stands in the history as good.
            count = values.judged - 1
            stored.remember(count, values.scale, norm, True)
            # Its microbatches ended the streak; windows in a row make their own.
            before = values._replace(judged=count, streak=values.dropped)
            after = optimizer.rule.after_non_finite(before, select)
            after = after._replace(norm=norm, dropped=after.streak, **EMPTY_WINDOW)
            stored.write(after)
            self.empty()
            self._blame(judged, squares)

        either(tf.math.is_finite(total), update, drop)

    def _apply_window(self, factor: tf.Tensor, norm: tf.Tensor) -> None:
        """Applies what a window has added up, to no other variables than it was for.

        Which those are is known of the present call alone while a graph is traced; what
        earlier calls have trained is told by flags.
        """
        optimizer, flags = self.optimizer, self._flags()
        given = {optimizer.position_of(v) for _, v in self.given}
        everything = list(enumerate(trained_by(optimizer)))
        conditions = {i: flags[i] for i, _ in everything if i not in given}
        if tf.executing_eagerly():
            given |= {i for i, flag in conditions.items() if flag}
            everything = [(i, v) for i, v in everything if i in given]
            conditions = {}
        chosen = [v for _, v in everything]
        totals = [optimizer.accumulator(v).value for v in chosen]
        self._apply(totals, chosen, factor, norm, conditions)

    def _apply(
        self,
        gradients: Any,
        variables: Sequence[Any],
        factor: tf.Tensor,
        norm: tf.Tensor,
        conditions: Mapping[int, tf.Tensor] | None = None,
    ) -> None:
        """Lets the inner optimizer make an update of `gradients` times `factor`.

        A gradient is a tensor, `tf.IndexedSlices`, an accumulator or None; `norm` is
        theirs after the multiplication. `conditions` has boolean scalars, by their
        positions, of those variables that may have to stay as they are.
        """
        optimizer, conditions = self.optimizer, conditions or {}
        limit = optimizer.shared_clip
        if limit is not None:
            factor = factor * (limit / tf.maximum(norm, limit))

        def condition_of(variable: Any) -> Any:
            return conditions.get(optimizer.position_of(variable))

        def update(gradients: Any) -> None:
            unscaled = []
            for gradient, variable in zip(gradients, variables, strict=True):
                if isinstance(gradient, tf.Variable):  # an accumulator
                    gradient = tf.convert_to_tensor(gradient)
                is_due = condition_of(variable) if conditions else None
                if gradient is not None and not optimizer.is_overwritten(variable):
                    gradient = multiplied(gradient, factor)
                elif gradient is not None and is_due is not None:
                    present = tf.cast(variable, gradient.dtype)
                    gradient = tf.where(is_due, gradient, present)
                unscaled.append(gradient)
            optimizer.update_inner(unscaled, variables)

        inner = optimizer.inner_optimizer
        with (
            on_reduced_gradients(inner, clips=limit is None),
            updating_only_if(leaves(inner) if conditions else [], condition_of),
        ):
            on_each_replica(self.strategy, update, gradients)

    def empty(self) -> None:
        """Begins a new window."""
        optimizer = self.optimizer

        def reset(_: Any) -> None:
            for variable in trained_by(optimizer):
                total = optimizer.accumulator(variable).value
                total.assign(tf.zeros(total.shape, total.dtype))

        optimizer.has_gradient.assign(tf.zeros_like(self._flags()))
        on_each_replica(self.strategy, reset)

    def _flags(self) -> tf.Tensor:
        """Returns for each variable whether the window has a gradient of it."""
        return tf.convert_to_tensor(self.optimizer.has_gradient.value)
