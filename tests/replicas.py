"""Two replicas on the two CPU devices of a test's process, and what they hold."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


def two_replicas() -> tf.distribute.MirroredStrategy:
    """Returns a strategy of its own for a test.

    It reduces without collectives: those of CPUs count their runs from the same number
    in every strategy, so that a second strategy of a process runs into what the first
    one left.
    """
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def on_both(strategy: tf.distribute.Strategy, variable: Any) -> np.ndarray:
    """Returns what a variable holds, once it is the same on both replicas."""
    first, second = strategy.experimental_local_results(variable.value)
    path = getattr(variable, "path", variable.name)
    np.testing.assert_array_equal(first, second, path)
    return first.numpy()


def check_replicas_agree(
    strategy: tf.distribute.Strategy, variables: Iterable[Any]
) -> None:
    """Fails where two replicas hold other bits."""
    for variable in variables:
        on_both(strategy, variable)
