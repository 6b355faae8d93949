"""A model's step as it is, and the same one with nothing added up over the replicas.

What replicas send one another goes through `ReplicaContext.all_reduce` and `all_gather`
(gradients, weights of losses, statistics that are synchronized) and `Strategy.reduce`
(logs). All are public: while a step is traced they count what they are given, or give
it back.

Relies on: them being looked up on `tf.distribute.ReplicaContext` and
`tf.distribute.Strategy` at each call.
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import Patch, PatchSet, replaced
from tfamp.trials.training import rows

# The first steps allocate, and XLA compiles a second time for donated buffers.
_WARM_STEPS = 2


class Payload:
    """What the replicas of this process hand to the reduction, as a trace shows it.

    Attributes:
        num_bytes: Bytes of all tensors.
        is_known: Whether each had a shape; of gradients with gaps the rows differ.
    """

    def __init__(self) -> None:
        self.num_bytes, self.is_known = 0, True

    def count(self, value: Any) -> None:
        """Adds the tensors of one call."""
        for leaf in tf.nest.flatten(value):
            tensor = leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
            tensor = tf.convert_to_tensor(tensor)
            size = tensor.shape.num_elements()
            self.is_known = self.is_known and size is not None
            self.num_bytes += (size or 0) * tensor.dtype.size


def counting(payload: Payload) -> contextlib.AbstractContextManager[None]:
    """Counts what is traced to be added up inside the block, and has it added up."""

    def all_reduce(original: Any) -> Any:
        @functools.wraps(original)
        def counted(
            self: Any, reduce_op: Any, value: Any, *args: Any, **how: Any
        ) -> Any:
            payload.count(value)
            return original(self, reduce_op, value, *args, **how)

        return counted

    def all_gather(original: Any) -> Any:
        def counted(self: Any, value: Any, *args: Any, **how: Any) -> Any:
            payload.count(value)
            return original(self, value, *args, **how)

        return counted

    return _patched(
        Patch(tf.distribute.ReplicaContext, "all_reduce", all_reduce),
        Patch(tf.distribute.ReplicaContext, "all_gather", all_gather),
    )


def alone() -> contextlib.AbstractContextManager[None]:
    """Has each replica keep what it would hand to the others, inside the block."""

    def all_reduce(self: Any, reduce_op: Any, value: Any, *_: Any, **how: Any) -> Any:
        # As the sum is: another tensor than what was given.
        return tf.nest.map_structure(_same, value)

    def all_gather(self: Any, value: Any, *_: Any, **how: Any) -> Any:
        return tf.nest.map_structure(_same, value)

    def reduce(self: Any, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        part = tf.convert_to_tensor(self.experimental_local_results(value)[0])
        return part if axis is None else tf.reduce_mean(part, axis)

    return _patched(
        Patch(tf.distribute.ReplicaContext, "all_reduce", lambda original: all_reduce),
        Patch(tf.distribute.ReplicaContext, "all_gather", lambda original: all_gather),
        Patch(tf.distribute.Strategy, "reduce", lambda original: reduce),
    )


@contextlib.contextmanager
def _patched(*patches: Patch) -> Iterator[None]:
    hooks = PatchSet(patches)
    hooks.install()
    try:
        yield
    finally:
        hooks.remove()


class Step:
    """One training step on a batch in memory, as `fit` takes it, ready to be timed.

    Rows of the batch are repeated to the `size` of all replicas together. Where it
    `reduces`, replicas add up what they have; else each goes on alone.
    """

    def __init__(
        self, model: keras.Model, parts: Any, size: int, *, reduces: bool = True
    ) -> None:
        self.payload = Payload()
        self._batch = divided(model, parts, size)
        with replaced(model, steps_per_execution=1):
            self._call = around_training.on_batch(model)
        with counting(self.payload) if reduces else alone():
            _wait(self._call(self._batch))

    def warm(self) -> float:
        """Runs it until it is warm; returns the seconds of the last step."""
        return [self.run(1) for _ in range(_WARM_STEPS)][-1]

    def run(self, num_steps: int) -> float:
        """Runs some steps, waits for the devices and returns their seconds."""
        began = time.perf_counter()
        for _ in range(num_steps):
            logs = self._call(self._batch)
        _wait(logs)
        return time.perf_counter() - began


def divided(model: keras.Model, parts: Any, size: int) -> Any:
    """Returns a batch of `size` examples as its replicas here get it in `fit`."""
    batch = tf.nest.map_structure(functools.partial(rows, size=size), parts)
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return batch
    options = tf.data.Options()
    # Each worker has the same batch in memory, and takes its part of it.
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    whole = tf.data.Dataset.from_tensor_slices(batch).batch(size).with_options(options)
    return next(iter(strategy.experimental_distribute_dataset(whole)))


def _wait(logs: Any) -> None:
    """Reads what a step gave, which waits for the device."""
    for leaf in tf.nest.flatten(logs)[:1]:
        np.asarray(leaf)


def _same(leaf: Any) -> Any:
    if isinstance(leaf, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(leaf.values), tf.identity(leaf.indices), leaf.dense_shape
        )
    return tf.identity(leaf)
