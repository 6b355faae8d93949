"""Hooks that make `fit` and `evaluate` run on several workers.

Relies on: `TensorFlowTrainer._maybe_symbolic_build` taking the first batch off an
iterator and passing it on as `data_batch`; `reduce_per_replica` of that module
reducing what a step returns; `_collective_all_reduce_multi_worker` telling whether
a strategy has several workers. Everything else runs as Keras wrote it.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer

from tfamp.keras_hooks.backend import TensorFlowTrainer
from tfamp.keras_hooks.patches import HeldPatches, Patch, like


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Builds from this worker's part of a batch: Keras averages over the workers."""

    @like(original)
    def _maybe_symbolic_build(
        self: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> Any:
        strategy = self._distribute_strategy
        if iterator is None or not _has_workers(strategy):
            return original(self, iterator=iterator, data_batch=data_batch)
        for *_, batches in iterator:
            data_batch = tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0],
                next(batches),
            )
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


def _has_workers(strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


# Held by managed models and by optimizers alike.
WORKER_HOOKS = HeldPatches(
    [
        Patch(TensorFlowTrainer, "_maybe_symbolic_build", _wrap_build),
        Patch(trainer, "reduce_per_replica", _wrap_reduce),
    ]
)
