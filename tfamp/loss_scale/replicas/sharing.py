"""Which models have replicas that count by the examples they have of a batch."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import replicas, trainer
from tfamp.keras_hooks.layers import record_of
from tfamp.loss_scale.step_state import ours_of

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
    is_known = record_of(model) is not None or strategy in STRATEGIES
    return is_known or bool(ours_of(model))


def sharing_whole_batch(model: keras.Model, data: Any, share: Any) -> Any:
    """Weights replicas by their whole batches, `data` being a `share` of one's."""
    part = trainer.batch_size_of(data) if weights_replicas(model) else None
    count = None if part is None else tf.round(part / share)
    return replicas.sharing(model, count, may_be_empty=False, reduces_weights=False)
