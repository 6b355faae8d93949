"""Hooks for a trainer whose replicas are on several workers.

Relies on: `_maybe_symbolic_build` taking the first batch off an iterator and passing it
on as `data_batch`; `reduce_per_replica` of the trainer's module reducing what a step
returns; `_collective_all_reduce_multi_worker` telling whether a strategy has several
workers; a variable's first value going from the chief to the others by
`collective_ops.broadcast_send` and `broadcast_recv`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging
from keras.src.backend.tensorflow import trainer
from tensorflow.python.ops import collective_ops

from tfamp.keras_hooks import worker_arrays
from tfamp.keras_hooks.backend import TensorFlowTrainer
from tfamp.keras_hooks.patches import HeldPatches, Patch, like, replaced


def summed(context: Any, values: Sequence[Any], options: Any = None) -> list[Any]:
    """Returns the sums over all replicas of tensors and `tf.IndexedSlices`.

    Those of each dtype go in a call of their own: workers join what is in one call.
    `options` are `tf.distribute.experimental.CommunicationOptions`.
    """
    places: dict[Any, list[int]] = {}
    sums: list[Any] = [None] * len(values)
    for place, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices) and value.dtype == tf.bfloat16:
            sums[place] = _gathered(context, value)
        else:
            places.setdefault(value.dtype, []).append(place)
    for some in places.values():
        given = [values[place] for place in some]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, given, options)
        for place, value in zip(some, reduced, strict=True):
            sums[place] = value
    return sums


def _gathered(context: Any, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the slices of all replicas one after the other, which is their sum.

    Their bits go as those of float16: collectives gather no bfloat16.
    """
    bits = tf.bitcast(slices.values, tf.float16)
    bits, indices = (
        context.all_gather(part, axis=0) for part in (bits, slices.indices)
    )
    values = tf.bitcast(bits, tf.bfloat16)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def part_of(batch: Any, strategy: Any) -> Any:
    """Returns the part of a batch that the first replica here gets."""
    return tf.nest.map_structure(
        lambda each: strategy.experimental_local_results(each)[0], batch
    )


def _wrap_send(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sends bfloat16, for which CPUs have no broadcast, as float32, which is exact."""

    @like(original)
    def broadcast_send(
        t: Any, shape: Any, dtype: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if dtype != tf.bfloat16:
            return original(t, shape, dtype, *args, **kwargs)
        sent = original(tf.cast(t, tf.float32), shape, tf.float32, *args, **kwargs)
        return tf.cast(sent, dtype)

    return broadcast_send


def _wrap_receive(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    def broadcast_recv(shape: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype != tf.bfloat16:
            return original(shape, dtype, *args, **kwargs)
        return tf.cast(original(shape, tf.float32, *args, **kwargs), dtype)

    return broadcast_recv


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Builds from one replica's part of a batch: Keras averages over them.

    That fails on workers, and where the first batch is uneven.
    """

    @like(original)
    def _maybe_symbolic_build(
        self: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        strategy = self._distribute_strategy
        if iterator is None or strategy is None or strategy.num_replicas_in_sync == 1:
            return original(self, iterator=iterator, data_batch=data_batch)
        for *_, batches in iterator:
            data_batch = part_of(next(batches), strategy)
            break
        return original(self, data_batch=data_batch)

    return _maybe_symbolic_build


def _wrap_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Averages scalars over the workers: Keras averages over their axis 0."""

    @like(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean") or not _has_workers(strategy):
            return original(values, strategy, reduction)

        def reduce(value: Any) -> Any:
            part = strategy.experimental_local_results(value)[0]
            if tf.convert_to_tensor(part).shape.rank == 0:
                return strategy.reduce("MEAN", value, axis=None)
            return original(value, strategy, reduction)

        return keras.tree.map_structure(reduce, values)

    return reduce_per_replica


def one_by_one(model: keras.Model, function: Callable[..., Any]) -> Any:
    """Returns a training or test function that takes steps in Python on workers.

    TensorFlow gives no keys to the reductions of a function that is called inside a
    loop of a graph (keras#19246), as Keras does for `steps_per_execution`.
    """
    if not _has_workers(model.distribute_strategy):
        return function

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        num_steps = int(model.steps_per_execution or 1)
        if num_steps == 1 or model.run_eagerly:
            return function(iterator)
        _say_once(num_steps)
        outputs = None
        with replaced(model, steps_per_execution=1):
            for done in range(num_steps):
                try:
                    outputs = function(iterator)
                except (StopIteration, tf.errors.OutOfRangeError):
                    if not done:
                        raise
                    break
        return outputs

    return call


@functools.cache
def _say_once(num_steps: int) -> None:
    logging.info(
        "The %d steps of an execution are a call each on several workers, since "
        "TensorFlow cannot reduce over them in a loop of its own (keras#19246).",
        num_steps,
    )


def _has_workers(strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


# Held by managed models and by optimizers alike.
WORKER_HOOKS = HeldPatches(
    [
        Patch(TensorFlowTrainer, "_maybe_symbolic_build", _wrap_build),
        Patch(trainer, "reduce_per_replica", _wrap_reduce),
        Patch(collective_ops, "broadcast_send", _wrap_send),
        Patch(collective_ops, "broadcast_recv", _wrap_receive),
        *worker_arrays.patches(_has_workers),
    ]
)
