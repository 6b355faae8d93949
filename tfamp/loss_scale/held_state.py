"""What a training step changes beside weights, put back where the step was skipped."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.loss_scale.branches import (
    either,
    first_of,
    stop_if_due,
    where_replicas_are_one,
)


class HeldState:
    """The state of a model ahead of a step, and of the counters of its optimizers.

    Moving statistics, and the states of recurrent layers, which Keras lists under no
    model. Random numbers go on, as they do in stock Keras, so that the next step draws
    another mask. Metrics are put back where one of them is not finite: they forget a
    bad batch, and count one that only overflowed.

    Args:
        model: The model whose step begins.
        optimizers: Its optimizers that scale losses.
    """

    def __init__(self, model: keras.Model, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._skips = [o.tally.read().counters.skipped for o in optimizers]
        self._held = _pairs(_moving_state(model))
        self._metrics = _pairs([v for m in model.metrics for v in m.variables])

    def put_back_if_skipped(self, written: set[int] | None = None) -> None:
        """Puts all back where any of the optimizers has skipped a step since.

        Args:
            written: The ids of the only variables that were written, if known.
        """
        held, metrics = self._held, self._metrics
        if written is not None:
            held = [pair for pair in held if id(pair[0].value) in written]
            metrics = [pair for pair in metrics if id(pair[0].value) in written]
        _put_metrics_back(metrics, self._any_skipped(self._optimizers, self._skips))
        variables = [variable.value for variable, _ in held]
        # Built in this very step at the latest, where they have stepped at all.
        stepped = [o.built for o in self._optimizers]

        def merged(strategy: Any, skips: Any, values: Any) -> None:
            def restore() -> None:
                done = []
                for variable, value in zip(variables, values, strict=True):
                    write = functools.partial(_write, strategy)
                    done.append(write(variable, value))
                after = [op for op in done if op is not None]
                for optimizer, has_stepped in zip(
                    self._optimizers, stepped, strict=True
                ):
                    if has_stepped:
                        stop_if_due(optimizer, after)

            skips = [first_of(strategy, skip) for skip in skips]
            either(self._any_skipped(self._optimizers, skips), restore, _nothing)

        where_replicas_are_one(merged, self._skips, [value for _, value in held])

    @staticmethod
    def _any_skipped(optimizers: Sequence[Any], skips: Sequence[Any]) -> tf.Tensor:
        now = [o.tally.read().counters.skipped for o in optimizers]
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


def _put_metrics_back(
    pairs: Sequence[tuple[Any, tf.Tensor]], was_skipped: tf.Tensor
) -> None:
    """Puts metrics back on this replica, whose part of them is its own."""
    floating = [v for v, value in pairs if value.dtype.is_floating]
    if not floating:
        return
    finite = [tf.reduce_all(tf.math.is_finite(v.value)) for v in floating]

    def restore() -> None:
        for variable, value in pairs:
            variable.value.assign(value)

    either(was_skipped & ~tf.reduce_all(tf.stack(finite)), restore, _nothing)


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
