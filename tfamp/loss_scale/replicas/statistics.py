"""Makes the moving statistics of all replicas one, where anything looks at them.

Each replica normalizes by its own part of a batch and keeps moving statistics of it.
Files, `get_weights` and callbacks see those of the first replica, on workers those of
the chief, and an evaluation uses all of them, each for its part.
"""

import functools
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.workers import summed


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
