"""The moving statistics of a model: put back where a step is skipped, averaged.

Each replica normalizes by its own part of a batch and keeps moving statistics of it.
Files, `get_weights` and callbacks see those of the first replica, on workers those of
the chief, and an evaluation uses all of them, each for its part. So replicas agree on
them before anything looks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import replicas, structure
from tfamp.keras_hooks.workers import summed
from tfamp.loss_scale.replicas import (
    either,
    first_of,
    stop_if_due,
    where_replicas_are_one,
)


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

    def put_back_if_skipped(self, written: set[int] | None = None) -> None:
        """Puts all back where any of the optimizers has skipped a step since.

        Only variables with their ids in `written` have to be, where that is known.
        """
        held, metrics = self._held, self._metrics
        if written is not None:
            held = [pair for pair in held if id(pair[0].value) in written]
            metrics = [pair for pair in metrics if id(pair[0].value) in written]
        self._put_metrics_back(metrics)
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
