"""Two replicas on the two CPU devices of a test's process."""

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
