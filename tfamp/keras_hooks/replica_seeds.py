"""Gives each replica random numbers of its own.

Every replica holds the same state of a seed generator, so in Keras all draw the same
dropout mask, and a batch on 8 replicas has one eighth of the noise that it should. What
a seed generator hands out is changed by the number of the replica; its state is not, so
that replicas agree on it, files hold it, and training that is resumed draws what it
would have drawn. The first replica draws what one device does.

Relies on: what draws random numbers asking `SeedGenerator.next` for a seed, of which
every pair of integers is one. Integers that a program passes as a seed stay as they
are: they ask for the same numbers each time.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.layer_record import CALLS
from tfamp.keras_hooks.patches import Patch, like
from tfamp.keras_hooks.replica_losses import is_sharing

# No divisor of 2**31 - 2, by which Keras takes the remainder of a seed: replicas, of
# which there are fewer, never come to have the same one.
_BETWEEN_REPLICAS = 1_013_904_223


def _wrap_next(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def next(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        # Models that are not managed draw what they draw in Keras.
        return _of_this_replica(seed) if CALLS.stack or is_sharing() else seed

    return next


def _of_this_replica(seed: Any) -> Any:
    """Returns a seed, of shape (2,), changed by the number of the replica."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seed
    number = tf.cast(context.replica_id_in_sync_group, seed.dtype)
    step = tf.constant([_BETWEEN_REPLICAS, 0], seed.dtype)
    return seed + number * step


def patches() -> list[Patch]:
    """Returns the patch on seed generators."""
    return [Patch(keras.random.SeedGenerator, "next", _wrap_next)]
