"""Functions that train on one batch as `fit` does, for those who draw the batches.

Relies on: `make_train_function` making the function out of `train_step` by
`_make_function`; what that gives running one step on each batch of a list, and reducing
what the replicas return.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.patches import replaced


def on_batch(model: keras.Model, step: Callable[[Any], Any] | None = None) -> Any:
    """Returns a function that trains on one batch as `fit` does, traced or compiled.

    Args:
        model: A compiled model.
        step: Takes the place of `train_step`, with all that tfamp puts around that one;
            None for the model's own.
    """
    made = type(model)._make_function
    if step is None:
        function = made(model, model.train_step)
    else:
        with replaced(model, train_step=step):
            function = made(model, step)
    return lambda data: function([data])


def on_replicas(model: keras.Model, step: Callable[[Any], Any]) -> Any:
    """As `on_batch`, of a step that nothing is put around; results stay per replica."""

    @tf.autograph.experimental.do_not_convert
    def one_step(data: Any) -> Any:
        return model.distribute_strategy.run(step, args=(data,))

    if model.run_eagerly:
        return one_step
    return tf.function(one_step, reduce_retracing=True, jit_compile=model.jit_compile)
