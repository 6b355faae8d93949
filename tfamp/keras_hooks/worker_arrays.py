"""Shuffles arrays in the same order on all workers.

Each of several workers takes its part of batches that it shuffles by itself. Where the
orders differ, as they do without a seed, some examples come twice in an epoch and
others never. So all take the order of the chief: by the seed of TensorFlow, if the
program has set it, or else by one drawn from Python's generator.

Relies on: `TFEpochIterator` asking its adapter for `get_tf_dataset` while it is made;
`ArrayDataAdapter` holding `_inputs`, `_num_samples`, `_batch_size` and `_shuffle`; the
eager context holding the seed of TensorFlow in `_seed`.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from tfamp.keras_hooks.patches import Patch, like, replaced

_SEED_BITS = 24  # exact in a float32, which every device can add up


class _Here(threading.local):
    """The strategy for which an iterator is being made, in this thread."""

    strategy: Any = None


_HERE = _Here()


def patches(has_workers: Callable[[Any], bool]) -> list[Patch]:
    """Returns the patches on the iterator of an epoch and on arrays.

    `has_workers` tells whether a strategy has several workers.
    """

    def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __init__(
            self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            before = _HERE.strategy
            is_spread = has_workers(distribute_strategy)
            _HERE.strategy = distribute_strategy if is_spread else None
            try:
                original(self, distribute_strategy, *args, **kwargs)
            finally:
                _HERE.strategy = before

        return __init__

    def wrap_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def get_tf_dataset(self: Any) -> Any:
            if _HERE.strategy is None or not self._shuffle:
                return original(self)
            if self._shuffle == "batch":
                raise ValueError(
                    "`shuffle` is 'batch' on several workers, which would shuffle each "
                    "batch in another order on each; expected True or False. Pass "
                    "`shuffle=True`."
                )
            seed, is_given = _chosen(_HERE.strategy)
            return _shuffled(self, seed, is_given=is_given)

        return get_tf_dataset

    return [
        Patch(trainer.TFEpochIterator, "__init__", wrap_init),
        Patch(ArrayDataAdapter, "get_tf_dataset", wrap_dataset),
    ]


def _chosen(strategy: Any) -> tuple[int, bool]:
    """Returns the seed that the chief chooses, and whether its program gave one.

    Every worker draws, so that Python's generators go on alike.
    """
    drawn, given = random.getrandbits(_SEED_BITS), context.global_seed()
    seed = drawn if given is None else given % 2**_SEED_BITS
    choice = tf.constant([float(seed), float(given is not None)])
    parts = strategy.experimental_distribute_values_from_function(
        lambda replica: choice * float(replica.replica_id_in_sync_group == 0)
    )
    chosen = strategy.reduce(tf.distribute.ReduceOp.SUM, parts, axis=None).numpy()
    return int(chosen[0]), bool(chosen[1])


def _shuffled(adapter: Any, seed: int, *, is_given: bool) -> Any:
    """Returns batches of shuffled examples.

    Each epoch has another order, but for a seed that the program has given: then all
    have one, as in Keras, by which training that is resumed finds its place.
    """
    num, batch_size = adapter._num_samples, adapter._batch_size

    def batches(number: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(num, dtype=tf.int64), seed=tf.stack([number, number])
        )
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    # Seeds of TensorFlow are mixed in, and may be others on each worker.
    with replaced(context.context(), _seed=None):
        numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=not is_given)
    indices = numbers.take(1).flat_map(batches)
    inputs = tree.lists_to_tuples(
        array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    )
    inputs = tf.data.Dataset.from_tensors(inputs).repeat()
    dataset = tf.data.Dataset.zip((indices, inputs))
    dataset = dataset.map(_grab, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_external_state_policy = (
        tf.data.experimental.ExternalStatePolicy.IGNORE
    )
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def _grab(rows: tf.Tensor, data: Any) -> Any:
    """Returns the rows of every array."""

    def grab(leaf: Any) -> Any:
        if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(leaf, rows)
        if isinstance(leaf, list | tuple | dict):
            return None
        return tf.gather(leaf, rows, axis=0) if tf.is_tensor(leaf) else leaf

    return tree.traverse(grab, data)
