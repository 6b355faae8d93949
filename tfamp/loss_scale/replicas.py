"""How a step goes over replicas, and the state of a model that goes along with it.

A step runs on each replica, for all as one, or ends training. The moving statistics of
a model are put back where a step is skipped, and averaged: each replica normalizes by
its own part of a batch and keeps moving statistics of it. Files, `get_weights` and
callbacks see those of the first replica, on workers those of the chief, and an
evaluation uses all of them, each for its part. So replicas agree on them before
anything looks.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import replicas, structure
from tfamp.keras_hooks.layers import policy_of
from tfamp.keras_hooks.optimizers import optimizers_of, strategy_of
from tfamp.keras_hooks.workers import summed
from tfamp.loss_scale.candidates import is_ours
from tfamp.loss_scale.stops import stop_if_due


def ours_of(model: Any) -> list[Any]:
    """Returns the optimizers of a model that are a `LossScaleOptimizer` of tfamp."""
    return [o for o in optimizers_of(model) if is_ours(o)]


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


def on_each_replica(
    strategy: tf.distribute.Strategy, do: Callable[..., None], values: Any = ()
) -> None:
    """Runs `do` on every replica, with the part of `values` that is its own."""

    def run(values: Any) -> None:
        do(values)

    if tf.distribute.in_cross_replica_context():
        strategy.extended.call_for_each_replica(run, args=(values,))
    else:
        run(values)


@contextlib.contextmanager
def on_all_replicas(optimizer: Any) -> Iterator[None]:
    """Makes what is assigned in the block arrive on every replica of an optimizer."""
    strategy = strategy_of(optimizer)
    has_others = strategy.num_replicas_in_sync > 1
    in_replica = not tf.distribute.in_cross_replica_context()
    with strategy.scope() if has_others and in_replica else contextlib.nullcontext():
        yield


# What `tfamp.distribute.strategy()` made: all models train there as on one device.
STRATEGIES: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def weights_replicas(model: keras.Model) -> bool:
    """Returns whether a model has replicas that count by their examples.

    A model of which tfamp knows neither itself, nor its optimizer, nor its strategy
    stays as Keras has it.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return False
    is_known = policy_of(model) is not None or strategy in STRATEGIES
    return is_known or bool(ours_of(model))


class StateBeforeStep:
    """The state of a model ahead of a step, and of the counters of its optimizers.

    Moving statistics, and the states of recurrent layers, which Keras lists under no
    model. Random numbers go on, as they do in stock Keras, so that the next step draws
    another mask. Metrics are put back where one of them is not finite: they forget a
    bad batch, and count one that only overflowed.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._skips = [o.scale_variables.read().skipped for o in optimizers]
        self._held = _pairs(_moving_state(model))
        self._metrics = _pairs([v for m in model.metrics for v in m.variables])

    def put_back_if_skipped(self) -> None:
        """Puts all back where any of the optimizers has skipped a step since."""
        held = self._held
        self._put_metrics_back(self._metrics)
        variables = [variable.value for variable, _ in held]
        # Built in this very step at the latest, where they have stepped at all.
        stepped = [o for o in self._optimizers if o.built]

        def merged(strategy: Any, skips: Any, values: Any) -> None:
            def restore() -> None:
                pairs = zip(variables, values, strict=True)
                done = [_write(strategy, variable, value) for variable, value in pairs]
                after = [op for op in done if op is not None]
                for optimizer in stepped:
                    stop_if_due(optimizer, after)

            skips = [first_of(strategy, skip) for skip in skips]
            either(self._any_skipped(skips), restore, _nothing)

        where_replicas_are_one(merged, self._skips, [value for _, value in held])

    def _put_metrics_back(self, pairs: Sequence[tuple[Any, tf.Tensor]]) -> None:
        """Puts metrics back on this replica, whose part of them is its own."""
        floating = [v for v, value in pairs if value.dtype.is_floating]
        if not floating:
            return
        finite = [tf.reduce_all(tf.math.is_finite(v.value)) for v in floating]
        is_bad = ~tf.reduce_all(tf.stack(finite))

        is_due = is_bad & self._any_skipped(self._skips)
        either(is_due, lambda: _put_back(pairs), _nothing)

    def _any_skipped(self, skips: Sequence[Any]) -> tf.Tensor:
        now = [o.scale_variables.read().skipped for o in self._optimizers]
        return tf.reduce_any(tf.stack(now) > tf.stack(list(skips)))


def _moving_state(model: keras.Model) -> list[Any]:
    held = list(model.non_trainable_weights)
    for _, layer, _ in structure.walk(model):
        if getattr(layer, "stateful", False):
            states = structure.flatten(getattr(layer, "states", None))
            held += [v for v in states if isinstance(v, keras.Variable)]
    return list({id(v): v for v in held}.values())


def _pairs(variables: Sequence[Any]) -> list[tuple[Any, tf.Tensor]]:
    """Returns the variables, each with its present value."""
    return [(v, tf.convert_to_tensor(v.value)) for v in variables]


def _put_back(pairs: Sequence[tuple[Any, tf.Tensor]]) -> None:
    """Gives variables their values back, on this replica alone."""
    for variable, value in pairs:
        variable.value.assign(value)


def _write(strategy: Any, variable: Any, value: Any) -> Any:
    if tf.distribute.in_cross_replica_context():
        done = strategy.extended.update(
            variable, lambda v, x: v.assign(x, read_value=False), args=(value,)
        )
    else:
        done = variable.assign(value, read_value=False)
    return done if isinstance(done, tf.Operation) else None


def _nothing() -> None:
    return None


def kept_if_empty(model: keras.Model, train_step: Callable[..., Any], data: Any) -> Any:
    """Runs a step; the moving statistics of no example, NaN, are not kept."""
    empty = replicas.is_empty()
    if empty is None:
        return train_step(data)
    # What replicas agree on is not written by one of them.
    held = _pairs([v for v in _moving_state(model) if v.aggregation in (None, "none")])
    logs = train_step(data)
    either(empty, lambda: _put_back(held), _nothing)
    return logs


class ReplicaStatistics:
    """Averages the moving statistics of a model over its replicas, once an epoch.

    The steps of BatchNormalization do not depend on them.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._is_done = False
        self._function: Any = None

    def begin_epoch(self) -> None:
        """Notes that the statistics move again."""
        self._is_done = False

    def average(self) -> None:
        """Gives every replica the mean over all of them, where they differ."""
        strategy = self._model.distribute_strategy
        if self._is_done or strategy.num_replicas_in_sync == 1:
            return
        self._is_done = True
        variables = _statistics_of(self._model)
        if not variables:
            return
        _say_once()

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            # A value that is only read belongs to no device, for workers to send it.
            values = [tf.identity(v.value) for v in variables]
            num = context.num_replicas_in_sync
            for variable, total in zip(variables, summed(context, values), strict=True):
                variable.value.assign(total / tf.cast(num, total.dtype))

        if self._function is None:
            self._function = tf.function(
                lambda: strategy.run(on_replica), autograph=False
            )
        self._function()


def _statistics_of(model: keras.Model) -> list[Any]:
    return [
        variable
        for _, layer, _ in structure.walk(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.built
        and layer.trainable
        and not layer.synchronized
        for variable in layer.non_trainable_weights
    ]


@functools.cache
def _say_once() -> None:
    logging.info(
        "Replicas normalize by their own parts of a batch in BatchNormalization; at "
        "the end of an epoch of `fit` all get the mean of their moving statistics. "
        "Pass the layers `synchronized=True` to normalize by the whole batch."
    )
