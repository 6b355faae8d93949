"""One step: gradients summed over replicas, judged once, and applied, added up or not.

They are judged and applied in the cross-replica context, so all replicas go the same
way and nothing is written before it is decided. Where a strategy cannot merge its
replicas (on GPUs under XLA) each of them does it alike.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks import replicas
from tfamp.keras_hooks.patches import replaced
from tfamp.keras_hooks.workers import summed
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.rule import EMPTY_WINDOW, ScaleState
from tfamp.loss_scale.stops import stop_if_due
from tfamp.loss_scale.tape import HERE, take_notes, verdict_on
from tfamp.records import checks

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10


def either(
    condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None] | None = None
) -> None:
    """Runs one of two functions that write to variables, or none without a second."""

    def run(write: Callable[[], None] | None) -> tf.Tensor:
        if write is not None:
            write()
        return tf.constant(0)  # `tf.cond` wants a value of both

    tf.cond(condition, lambda: run(yes), lambda: run(no))


def first_of(value: Any) -> Any:
    """Returns the part of a value that this process's first replica holds."""
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def _on_each_replica(do: Callable[[Any], None], values: Any = ()) -> None:
    """Runs `do` on every replica, with the part of `values` that is its own."""
    if tf.distribute.in_cross_replica_context():
        run = tf.autograph.experimental.do_not_convert(lambda part: do(part))
        extended = tf.distribute.get_strategy().extended
        extended.call_for_each_replica(run, args=(values,))
    else:
        do(values)


def take(
    optimizer: Any, gradients: list[Any], variables: list[Any], update: Any
) -> None:
    """Takes a step of all replicas, from inside of each.

    `update` is the method of the inner optimizer that applies gradients to variables.
    """
    notes = take_notes(variables)
    come_scaled = not optimizer.was_unscaled and all(note.by_hand for note in notes)
    optimizer.was_unscaled = False
    if come_scaled and not notes:
        _warn_of_unscaled_loss(optimizer)
    scale = optimizer.scale_variables.read().scale
    held = scale if come_scaled else tf.constant(1.0)
    if come_scaled and notes and isinstance(notes[0].by_hand, float):
        held = tf.constant(notes[0].by_hand)  # by a wrapper that was not built
    # Whether gradients were finite as the tape gave them, where they were changed
    # since: clipping by value hides an overflow.
    verdict, empty = verdict_on(notes, gradients), replicas.is_empty()
    if empty is not None:
        gradients = replicas.of_examples(gradients)
        verdict = None if verdict is None else verdict | empty
    num_spoilt = tf.constant(0.0) if verdict is None else tf.cast(~verdict, "float32")
    weight = tf.convert_to_tensor(1.0 if HERE.weight is None else HERE.weight)
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        can_merge = not tf.__internal__.distribute.strategy_supports_no_merge_call()
        if can_merge and hooks.in_xla():
            raise RuntimeError(
                f"`jit_compile=True` under {type(strategy).__name__}: TensorFlow cannot"
                " compile a step of several replicas by XLA on these devices "
                "(keras#21366). Pass `jit_compile=False`."
            )
        # float16 is sent at the loss scale, if that is not in the gradients.
        is_short = optimizer.reduce_dtype == "float16" and not come_scaled
        factor = scale if is_short else tf.constant(1.0)
        gradients, weight, num_spoilt = _summed(
            optimizer, gradients, variables, (weight, num_spoilt), factor
        )

    def merged(gradients: Any, weight: Any, num_spoilt: Any) -> None:
        was_finite = None
        if verdict is not None:
            was_finite = tf.equal(first_of(num_spoilt), 0.0)
        step = Step(optimizer, gradients, variables, update)
        step.judge(first_of(weight), was_finite, held)

    hooks.where_replicas_are_one(merged, gradients, weight, num_spoilt)


def _summed(
    optimizer: Any, gradients: Any, variables: Any, others: Any, factor: tf.Tensor
) -> tuple[Any, ...]:
    """Returns sums over all replicas; gradients in float32 are sent as it is asked."""
    narrow = tf.as_dtype(optimizer.reduce_dtype or "float32")
    found = {
        i: gradient for i, gradient in enumerate(gradients) if gradient is not None
    }
    new = [i for i in found if optimizer.is_overwritten(variables[i])]
    narrowed = [
        i
        for i, gradient in found.items()
        if narrow != tf.float32 == gradient.dtype and i not in new
    ]
    found |= {i: multiplied(found[i], factor, narrow) for i in narrowed}
    given = [*found.values(), *others]
    *sums, weight, num = summed(tf.distribute.get_replica_context(), given)
    found = dict(zip(found, sums, strict=True))
    found |= {i: multiplied(found[i], 1 / factor) for i in narrowed}
    share = 1 / tf.distribute.get_strategy().num_replicas_in_sync
    found |= {i: multiplied(found[i], share) for i in new}
    return [found.get(i) for i in range(len(gradients))], weight, num


@tf.autograph.experimental.do_not_convert
def on_window(optimizer: Any, *, applies: bool) -> None:
    """Applies or forgets the microbatches of a window that is not full, if any."""
    if not (optimizer.built and optimizer.accumulates):
        return

    def work() -> None:
        before, step = optimizer.scale_variables.read(), Step(optimizer)
        if applies:
            either(before.microbatches > 0, lambda: step.close(before))
        else:
            step.begin_window()
            optimizer.scale_variables.write(before._replace(**EMPTY_WINDOW))

    with hooks.scope_of(hooks.strategy_of(optimizer)):
        hooks.where_replicas_are_one(work)


def _warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    has_no_scale = not optimizer.dynamic and optimizer.initial_scale == 1
    if optimizer.has_scaled_loss or has_no_scale:
        return
    optimizer.num_unexplained += 1
    if tf.executing_eagerly() and optimizer.num_unexplained < _EAGER_STEPS:
        return
    optimizer.has_scaled_loss = True  # it is told
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed. "
        f"{checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


class Step:
    """A step across replicas, of gradients that are summed over them, or None."""

    def __init__(
        self,
        optimizer: Any,
        gradients: Sequence[Any] = (),
        variables: Sequence[Any] = (),
        update: Any = None,
    ) -> None:
        self.optimizer, self.stored = optimizer, optimizer.scale_variables
        self.gradients, self.variables = gradients, variables
        self.update = update or optimizer.inner_optimizer.apply
        pairs = zip(gradients, map(optimizer.position_of, variables), strict=True)
        self.given = {position: g for g, position in pairs if g is not None}
        # What takes its gradient as its value, such as the scales of float8.
        trained = enumerate(hooks.trained_by(optimizer))
        self.overwritten = {i for i, v in trained if optimizer.is_overwritten(v)}

    def judge(self, weight: Any, was_finite: Any, scale: tf.Tensor) -> None:
        """Judges the gradients, and applies them, adds them up or skips the step.

        `weight` is that of this microbatch in its window, a float32 scalar; gradients
        are multiplied by `scale`. `was_finite` says whether they were finite on all
        replicas before the user's code changed them: a boolean scalar, or None.
        """
        optimizer, rule, before = (
            self.optimizer,
            self.optimizer.rule,
            self.stored.read(),
        )
        squares = sums_of_squares([first_of(g) for g in self.given.values()])
        is_finite = tf.math.is_finite(tf.reduce_sum(squares))
        if was_finite is not None:
            # At a scale of 1 a lower one is no remedy: whoever makes gradients finite
            # there does so in float32 too.
            lowest = max(1.0, rule.min_scale)
            is_finite &= was_finite | (optimizer.dynamic & (before.scale <= lowest))
        norm = self._norm(squares, self.given) / scale

        def go_on() -> None:
            after = rule.after_finite(before)
            after = after._replace(norm=norm, finite_norm=norm)
            if not optimizer.accumulates:
                self._apply(self.gradients, self.variables, 1 / scale, norm)
                self._write(after, applied=after.applied + 1, dropped=0)
                return
            self._add_up(weight / scale)
            after = after._replace(
                microbatches=after.microbatches + 1, weight=after.weight + weight
            )
            is_full = after.microbatches >= optimizer.accumulation_steps
            either(is_full, lambda: self.close(after), lambda: self._write(after))

        def skip() -> None:
            self._write(rule.after_non_finite(before), norm=norm)
            self._blame(list(self.given), squares)

        either(is_finite, go_on, skip)

    def _norm(self, squares: tf.Tensor, positions: Iterable[int]) -> tf.Tensor:
        """Returns the norm of gradients; new values are judged, and have no length."""
        if self.overwritten:
            own = [i for i, x in enumerate(positions) if x not in self.overwritten]
            squares = tf.gather(squares, tf.constant(own, tf.int32))
        return tf.sqrt(tf.reduce_sum(squares))

    def _write(self, state: ScaleState, **changes: Any) -> None:
        self.stored.write(state._replace(**changes))

    def _blame(self, positions: Sequence[int], squares: tf.Tensor) -> None:
        self.stored.note(positions, squares)
        stop_if_due(self.optimizer)

    def _add_up(self, factor: tf.Tensor) -> None:
        """Adds gradients times `factor` to the accumulators, in float32.

        Of what takes its gradient as its value they hold the maximum, as in Keras.
        """
        totals = self.optimizer.accumulators

        def add(gradients: Any) -> None:
            for position, gradient in gradients.items():
                total, part = totals[position].value, multiplied(gradient, factor)
                if position in self.overwritten:
                    total.assign(tf.maximum(total, gradient))
                elif isinstance(part, tf.IndexedSlices):
                    total.scatter_add(part)
                else:
                    total.assign_add(tf.cast(part, total.dtype))

        now = tf.constant([i in self.given for i in range(len(totals))])
        flags = self.optimizer.has_gradient
        flags.assign(tf.convert_to_tensor(flags.value) | now)
        _on_each_replica(add, self.given)

    def begin_window(self) -> None:
        """Empties the accumulators."""

        def reset(_: Any) -> None:
            for variable in self.optimizer.accumulators:
                variable.value.assign(tf.zeros_like(variable.value))

        flags = self.optimizer.has_gradient
        flags.assign(tf.zeros(flags.shape, tf.bool))
        _on_each_replica(reset)

    def close(self, values: ScaleState) -> None:
        """Makes an update of the mean of a window's microbatches, and begins anew.

        No other variables are updated than those that it has gradients of. Which those
        are is known of the present call alone while a graph is traced; what earlier
        calls have trained is told by flags.
        """
        optimizer = self.optimizer
        flags = tf.convert_to_tensor(optimizer.has_gradient.value)
        totals = [variable.value for variable in optimizer.accumulators]
        squares = sums_of_squares([first_of(total) for total in totals])
        norm = self._norm(squares, range(len(totals))) / values.weight

        def update() -> None:
            chosen = dict(enumerate(hooks.trained_by(optimizer)))
            conditions = {i: flags[i] for i in chosen if i not in self.given}
            if tf.executing_eagerly():
                idle = [i for i, condition in conditions.items() if not condition]
                chosen = {i: v for i, v in chosen.items() if i not in idle}
                conditions = {}
            self._apply(
                [totals[i] for i in chosen],
                list(chosen.values()),
                *(1 / values.weight, norm, conditions),
            )
            after = values._replace(norm=norm, finite_norm=norm, **EMPTY_WINDOW)
            self._write(after, applied=after.applied + 1, dropped=0)
            self.begin_window()

        def drop() -> None:  # finite parts whose sum is not
            # Its microbatches ended the streak; windows in a row make their own.
            before = values._replace(judged=values.judged - 1, streak=values.dropped)
            after = optimizer.rule.after_non_finite(before)
            self._write(after, norm=norm, dropped=after.streak, **EMPTY_WINDOW)
            self.begin_window()
            self._blame(range(len(totals)), squares)

        either(tf.math.is_finite(tf.reduce_sum(squares)), update, drop)

    def _apply(
        self,
        gradients: Any,
        variables: Sequence[Any],
        factor: tf.Tensor,
        norm: tf.Tensor,
        conditions: dict[int, tf.Tensor] | None = None,
    ) -> None:
        """Lets the inner optimizer make an update of `gradients` times `factor`.

        A gradient is a tensor, `tf.IndexedSlices`, an accumulator or None; `norm` is
        theirs after the multiplication. `conditions` has boolean scalars, by their
        positions, of those variables that may have to stay as they are.
        """
        optimizer, limit = self.optimizer, self.optimizer.shared_clip
        if limit is not None:
            factor = factor * (limit / tf.maximum(norm, limit))

        def condition_of(variable: Any) -> Any:
            return (conditions or {}).get(optimizer.position_of(variable))

        def update(gradients: Any) -> None:
            unscaled = []
            for gradient, variable in zip(gradients, variables, strict=True):
                if isinstance(gradient, tf.Variable):  # an accumulator
                    gradient = tf.convert_to_tensor(gradient)
                if gradient is not None and not optimizer.is_overwritten(variable):
                    gradient = multiplied(gradient, factor)
                unscaled.append(gradient)
            with replaced(HERE, is_updating=True, update=None):
                self.update(unscaled, variables)

        with hooks.on_reduced_gradients(
            optimizer.inner_optimizer,
            clips=limit is None,
            condition_of=condition_of if conditions else None,
        ):
            _on_each_replica(update, gradients)
