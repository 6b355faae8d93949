"""Hooks for a trainer whose replicas are on several workers.

Each worker takes its part of batches of arrays that it shuffles by itself. Where the
orders differ, as they do without a seed, some examples come twice in an epoch and
others never. So all take the order of the chief: by the seed of TensorFlow, if the
program has set it, or else by one drawn from Python's generator.

Relies on: `_maybe_symbolic_build` passing the first batch on as `data_batch`;
`reduce_per_replica` reducing what a step returns; `_collective_all_reduce_multi_worker`
telling whether there are several workers; `TFEpochIterator` asking its adapter for
`get_tf_dataset` while it is made; `ArrayDataAdapter` holding `_inputs`, `_num_samples`,
`_batch_size` and `_shuffle`; the eager context holding the seed of TensorFlow in
`_seed`.
"""

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from tfamp.keras_hooks.backend import TensorFlowTrainer
from tfamp.keras_hooks.patches import Function, Patch, PatchSet, replaced, wrapper

_SEED_BITS = 24  # exact in a float32, which every device can add up


class _Here(threading.local):
    """The strategy for which an iterator is being made, in this thread."""

    strategy: Any = None


_HERE = _Here()


def summed(context: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the sums over all replicas of tensors and `tf.IndexedSlices`.

    Those of each dtype go in a call of their own: workers join what is in one call.
    Slices in bfloat16, which collectives do not gather, go by their bits.
    """
    sums: list[Any] = [None] * len(values)
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices) and value.dtype == tf.bfloat16:
            bits = context.all_gather(tf.bitcast(value.values, tf.float16), axis=0)
            indices = context.all_gather(value.indices, axis=0)
            rows = tf.bitcast(bits, tf.bfloat16)
            sums[place] = tf.IndexedSlices(rows, indices, value.dense_shape)
        else:
            places.setdefault(value.dtype, []).append(place)
    for some in places.values():
        given = [values[place] for place in some]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, given)
        for place, value in zip(some, reduced, strict=True):
            sums[place] = value
    return sums


def part_of(batch: Any, strategy: Any) -> Any:
    """Returns the part of a batch that the first replica here gets."""
    return tf.nest.map_structure(
        lambda each: strategy.experimental_local_results(each)[0], batch
    )


@wrapper
def _wrap_build(
    original: Function, self: keras.Model, iterator: Any = None, data_batch: Any = None
) -> Any:
    """Builds from one replica's part of a batch: Keras averages uneven ones."""
    strategy = self._distribute_strategy
    if iterator is not None and strategy and strategy.num_replicas_in_sync > 1:
        for *_, batches in iterator:
            return original(self, data_batch=part_of(next(batches), strategy))
    return original(self, iterator=iterator, data_batch=data_batch)


@wrapper
def _wrap_reduce(original: Function, values: Any, strategy: Any, reduction: str) -> Any:
    """Averages scalars over the workers: Keras averages over their axis 0."""
    if reduction not in ("auto", "mean") or not _has_workers(strategy):
        return original(values, strategy, reduction)

    def reduce(value: Any) -> Any:
        part = strategy.experimental_local_results(value)[0]
        if tf.convert_to_tensor(part).shape.rank == 0:
            return strategy.reduce("MEAN", value, axis=None)
        return original(value, strategy, reduction)

    return keras.tree.map_structure(reduce, values)


def one_by_one(model: keras.Model, function: Callable[..., Any]) -> Any:
    """Returns a training or test function that takes steps in Python on workers.

    Inside a loop of a graph reductions get no keys (keras#19246).
    """
    if not _has_workers(model.distribute_strategy):
        return function

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        num_steps = int(model.steps_per_execution or 1)
        if num_steps == 1 or model.run_eagerly:
            return function(iterator)
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


def _has_workers(strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


@wrapper
def _wrap_iterator(
    original: Function,
    self: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kw: Any,
) -> None:
    is_spread = _has_workers(distribute_strategy)
    with replaced(_HERE, strategy=distribute_strategy if is_spread else None):
        original(self, distribute_strategy, *args, **kw)


@wrapper
def _wrap_dataset(original: Function, self: Any) -> Any:
    if _HERE.strategy is None or not self._shuffle:
        return original(self)
    return _shuffled(self, *_chosen(_HERE.strategy))


def _chosen(strategy: Any) -> tuple[int, bool]:
    """Returns the seed that the chief chooses, and whether its program gave one."""
    drawn, given = random.getrandbits(_SEED_BITS), context.global_seed()
    seed = drawn if given is None else given % 2**_SEED_BITS
    choice = tf.constant([float(seed), float(given is not None)])
    parts = strategy.experimental_distribute_values_from_function(
        lambda replica: choice * float(replica.replica_id_in_sync_group == 0)
    )
    chosen = strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None).numpy()
    return int(chosen[0]), bool(chosen[1])


def _shuffled(adapter: Any, seed: int, is_given: bool) -> Any:
    """Returns batches of shuffled examples, in another order each epoch.

    But for a seed that the program has given: then all have one, as in Keras.
    """
    num, batch_size = adapter._num_samples, adapter._batch_size

    def batches(number: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(num, dtype=tf.int64), seed=tf.stack([number, number])
        )
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    def rows_of(rows: tf.Tensor, data: Any) -> Any:
        def grab(leaf: Any) -> Any:
            if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(leaf, rows)
            if isinstance(leaf, list | tuple | dict):
                return None
            return tf.gather(leaf, rows, axis=0) if tf.is_tensor(leaf) else leaf

        return tree.traverse(grab, data)

    # Seeds of TensorFlow are mixed in, and may be others on each worker.
    with replaced(context.context(), _seed=None):
        numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=not is_given)
    inputs = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )
    inputs = tf.data.Dataset.from_tensors(inputs).repeat()
    dataset = tf.data.Dataset.zip((numbers.take(1).flat_map(batches), inputs))
    dataset = dataset.map(rows_of, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_external_state_policy = (
        tf.data.experimental.ExternalStatePolicy.IGNORE
    )
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


# Held by managed models and by optimizers alike.
WORKER_HOOKS = PatchSet(
    [
        Patch(TensorFlowTrainer, "_maybe_symbolic_build", _wrap_build),
        Patch(trainer, "reduce_per_replica", _wrap_reduce),
        Patch(trainer.TFEpochIterator, "__init__", _wrap_iterator),
        Patch(ArrayDataAdapter, "get_tf_dataset", _wrap_dataset),
    ]
)
