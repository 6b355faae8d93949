"""One step: gradients summed over replicas, judged once, and applied, added up or not.

They are judged and applied in the cross-replica context, so all replicas go the same
way and nothing is written before it is decided. Where a strategy cannot merge its
replicas (on GPUs under XLA) each of them does it alike.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks import replicas
from tfamp.keras_hooks.patches import replaced
from tfamp.keras_hooks.workers import summed
from tfamp.loss_scale.rule import EMPTY_WINDOW, ScaleState, select
from tfamp.loss_scale.stops import stop_if_due
from tfamp.loss_scale.tape import (
    HERE,
    multiplied,
    sums_of_squares,
    take_notes,
    verdict_on,
)
from tfamp.records import checks

# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10


def either(
    condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None]
) -> None:
    """Runs one of two functions that write to variables."""

    def branch(write: Callable[[], None]) -> Callable[[], tf.Tensor]:
        def run() -> tf.Tensor:
            write()
            return tf.constant(0)  # `tf.cond` wants a value of both

        return run

    tf.cond(condition, branch(yes), branch(no))


def first_of(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Returns the part of a value that this process's first replica holds."""
    return strategy.experimental_local_results(value)[0]


def where_replicas_are_one(do: Callable[..., None], *values: Any) -> None:
    """Runs `do(strategy, *values)` once for all replicas, from inside of each.

    Where a strategy cannot merge its replicas, it runs on each of them.
    """
    strategy = tf.distribute.get_strategy()
    tf.__internal__.distribute.interim.maybe_merge_call(do, strategy, *values)


def _on_each_replica(
    strategy: tf.distribute.Strategy, do: Callable[[Any], None], values: Any = ()
) -> None:
    """Runs `do` on every replica, with the part of `values` that is its own."""
    if tf.distribute.in_cross_replica_context():
        run = tf.autograph.experimental.do_not_convert(lambda part: do(part))
        strategy.extended.call_for_each_replica(run, args=(values,))
    else:
        do(values)


@contextlib.contextmanager
def on_all_replicas(optimizer: Any) -> Iterator[None]:
    """Makes what is assigned in the block arrive on every replica of an optimizer."""
    strategy = hooks.strategy_of(optimizer)
    has_others = strategy.num_replicas_in_sync > 1
    in_replica = not tf.distribute.in_cross_replica_context()
    with strategy.scope() if has_others and in_replica else contextlib.nullcontext():
        yield


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
    # By a wrapper of Keras that was not built: a number in the traced function.
    known = notes[0].by_hand if come_scaled and notes else True
    held = tf.constant(known) if isinstance(known, float) else scale
    held = held if come_scaled else tf.constant(1.0)
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
        factor = tf.constant(1.0) if come_scaled else scale
        sums = _summed(
            optimizer,
            [*gradients, weight, num_spoilt],
            [*variables, None, None],
            factor,
        )
        *gradients, weight, num_spoilt = sums

    def merged(strategy: Any, gradients: Any, weight: Any, num_spoilt: Any) -> None:
        was_finite = None
        if verdict is not None:
            was_finite = tf.equal(first_of(strategy, num_spoilt), 0.0)
        step = Step(strategy, optimizer, gradients, variables, update)
        step.judge(first_of(strategy, weight), was_finite, held)

    can_merge = not tf.__internal__.distribute.strategy_supports_no_merge_call()
    if can_merge and strategy.num_replicas_in_sync > 1 and hooks.in_xla():
        raise RuntimeError(
            f"`jit_compile=True` under {type(strategy).__name__}: TensorFlow cannot "
            "compile a step of several replicas by XLA on these devices "
            "(keras#21366). Pass `jit_compile=False`."
        )
    where_replicas_are_one(merged, gradients, weight, num_spoilt)


def _summed(
    optimizer: Any, values: list[Any], variables: list[Any], factor: tf.Tensor
) -> list[Any]:
    """Returns sums over all replicas; gradients in float32 are sent as it is asked.

    float16 is sent at the loss scale: `factor`, where it is not in the gradients.
    """
    narrow = tf.as_dtype(optimizer.reduce_dtype or "float32")
    factor = factor if narrow == tf.float16 else tf.constant(1.0)
    places = [i for i, value in enumerate(values) if value is not None]
    narrowed = {
        i
        for i in places
        if (variable := variables[i]) is not None
        and narrow != tf.float32 == values[i].dtype
        and not optimizer.is_overwritten(variable)
    }
    sent = [
        multiplied(values[i], factor, narrow) if i in narrowed else values[i]
        for i in places
    ]
    found = list(values)
    sums = summed(tf.distribute.get_replica_context(), sent)
    for i, total in zip(places, sums, strict=True):
        found[i] = multiplied(total, 1 / factor) if i in narrowed else total
    return found


@tf.autograph.experimental.do_not_convert
def on_window(take: Callable[..., None], optimizer: Any) -> None:
    """Has `flush` or `discard` do its work on all replicas of an optimizer."""
    if not (optimizer.built and optimizer.accumulates):
        return
    strategy, ours = tf.distribute.get_strategy(), hooks.strategy_of(optimizer)
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
    step = Step(strategy, optimizer)
    either(before.microbatches > 0, lambda: step.close(before), lambda: None)


def discard(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    """Forgets the microbatches of a window that is not full."""
    before = optimizer.scale_variables.read()
    Step(strategy, optimizer).empty()
    optimizer.scale_variables.write(before._replace(**EMPTY_WINDOW))


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
    """A step across replicas.

    `gradients` are sums over them, equal on all, or None.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        optimizer: Any,
        gradients: Sequence[Any] = (),
        variables: Sequence[Any] = (),
        update: Any = None,
    ) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        self.stored = optimizer.scale_variables
        self.gradients, self.variables = gradients, variables
        self.update = update or optimizer.inner_optimizer.apply
        pairs = zip(gradients, variables, strict=True)
        self.given = [(g, v) for g, v in pairs if g is not None]

    def judge(self, weight: Any, was_finite: Any, scale: tf.Tensor) -> None:
        """Judges the gradients, and applies them, adds them up or skips the step.

        Args:
            weight: That of this microbatch in its window, a float32 scalar.
            was_finite: Whether the gradients were finite on all replicas before the
                user's code changed them: a boolean scalar, or None.
            scale: What they are multiplied by.
        """
        optimizer, before = self.optimizer, self.stored.read()
        squares = sums_of_squares([first_of(self.strategy, g) for g, _ in self.given])
        is_finite = tf.math.is_finite(tf.reduce_sum(squares))
        if was_finite is not None:
            # At a scale of 1 a lower one is no remedy: whoever makes gradients finite
            # there does so in float32 too.
            lowest = max(1.0, optimizer.rule.min_scale)
            is_finite &= was_finite | (optimizer.dynamic & (before.scale <= lowest))
        norm = tf.sqrt(tf.reduce_sum(squares)) / scale

        def go_on() -> None:
            after = optimizer.rule.after_finite(before, select)
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
            self._write(optimizer.rule.after_non_finite(before, select), norm=norm)
            self._blame([v for _, v in self.given], squares)

        either(is_finite, go_on, skip)

    def _write(self, state: ScaleState, **changes: Any) -> None:
        self.stored.write(state._replace(**changes))

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
                total = optimizer.accumulators[optimizer.position_of(variable)].value
                part = multiplied(gradient, factor)
                if isinstance(part, tf.IndexedSlices):
                    total.scatter_add(part)
                else:
                    total.assign_add(tf.cast(part, total.dtype))

        given = {optimizer.position_of(v) for _, v in self.given}
        flags = [i in given for i in range(len(optimizer.accumulators))]
        optimizer.has_gradient.assign(self._flags() | tf.constant(flags))
        _on_each_replica(self.strategy, add, self.gradients)

    def close(self, values: ScaleState) -> None:
        """Makes an update of the mean of a window's microbatches, and begins anew."""
        optimizer = self.optimizer
        totals = [first_of(self.strategy, v.value) for v in optimizer.accumulators]
        squares = sums_of_squares(totals)
        total = tf.reduce_sum(squares)
        norm = tf.sqrt(total) / values.weight

        def update() -> None:
            self._apply_window(1 / values.weight, norm)
            after = values._replace(norm=norm, finite_norm=norm, **EMPTY_WINDOW)
            self._write(after, applied=after.applied + 1, dropped=0)
            self.empty()

        def drop() -> None:  # finite parts whose sum is not
            # Its microbatches ended the streak; windows in a row make their own.
            before = values._replace(judged=values.judged - 1, streak=values.dropped)
            after = optimizer.rule.after_non_finite(before, select)
            self._write(after, norm=norm, dropped=after.streak, **EMPTY_WINDOW)
            self.empty()
            self._blame(hooks.trained_by(optimizer), squares)

        either(tf.math.is_finite(total), update, drop)

    def _apply_window(self, factor: tf.Tensor, norm: tf.Tensor) -> None:
        """Applies what a window has added up, to no other variables than it was for.

        Which those are is known of the present call alone while a graph is traced; what
        earlier calls have trained is told by flags.
        """
        optimizer, flags = self.optimizer, self._flags()
        given = {optimizer.position_of(v) for _, v in self.given}
        chosen = list(enumerate(hooks.trained_by(optimizer)))
        conditions = {i: flags[i] for i, _ in chosen if i not in given}
        if tf.executing_eagerly():
            chosen = [(i, v) for i, v in chosen if i in given or conditions[i]]
            conditions = {}
        totals = [optimizer.accumulators[i].value for i, _ in chosen]
        self._apply(totals, [v for _, v in chosen], factor, norm, conditions)

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
        optimizer, inner = self.optimizer, self.optimizer.inner_optimizer
        limit = optimizer.shared_clip
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

        with (
            hooks.on_reduced_gradients(inner, clips=limit is None),
            hooks.updating_only_if(
                hooks.leaves(inner) if conditions else [], condition_of
            ),
        ):
            _on_each_replica(self.strategy, update, gradients)

    def empty(self) -> None:
        """Begins a new window."""
        optimizer = self.optimizer

        def reset(_: Any) -> None:
            for variable in optimizer.accumulators:
                variable.value.assign(tf.zeros_like(variable.value))

        optimizer.has_gradient.assign(tf.zeros_like(self._flags()))
        _on_each_replica(self.strategy, reset)

    def _flags(self) -> tf.Tensor:
        """Returns for each variable whether the window has a gradient of it."""
        return tf.convert_to_tensor(self.optimizer.has_gradient.value)
