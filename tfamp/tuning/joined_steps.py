"""How many steps a call of TensorFlow runs best: `steps_per_execution`, by timing.

Where a step takes less than Python does between two calls, several in one are faster.
"""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import replaced

SIZES = (1, 8, 32, 100)
# Longer steps are joined for nothing: what Python does between them is a hundredth.
LONGEST_STEP = 0.01
_SECONDS, _ROUNDS = 0.15, 3  # how long and how often each is timed
_BY_EPOCH = "epoch"


def sizes_for(num_batches: int | None) -> list[int]:
    """Returns the sizes to try for an epoch of so many batches, None if not known.

    Example:
        >>> sizes_for(None), sizes_for(40), sizes_for(5)
        ([1, 8, 32, 100], [1, 8, 32], [1])
    """
    return [n for n in SIZES if n == 1 or num_batches is None or n <= num_batches]


def obstacle(model: keras.Model, arguments: Mapping[str, Any], size: int) -> str | None:
    """Returns why the steps of a `fit` stay single, None where they may be joined."""
    if model.run_eagerly:
        return "the model runs eagerly"
    for name in ("steps_per_epoch", "validation_steps"):
        if (arguments.get(name) or 0) % size:  # a call would go beyond it
            return f"`{name}` is {arguments[name]}, no multiple of {size}"
    callbacks = arguments.get("callbacks")
    given = getattr(callbacks, "callbacks", callbacks)
    for each in tf.nest.flatten(given) if given else ():
        if _acts_on_batches(each):
            return f"the callback {type(each).__name__} acts on each batch"
    return None


def _acts_on_batches(callback: Any) -> bool:
    kind = type(callback)
    if kind.__module__.startswith("tfamp."):
        return False  # they know of joined steps
    for name in ("save_freq", "update_freq"):  # of Keras's own
        if kind.__module__.startswith("keras.") and hasattr(callback, name):
            return getattr(callback, name) != _BY_EPOCH
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin")
    return any(
        getattr(kind, name, None) is not getattr(keras.callbacks.Callback, name)
        for name in (*names, "on_batch_end")
    )


def measured(
    model: keras.Model, batches: Sequence[Any], sizes: Iterable[int]
) -> dict[int, float]:
    """Returns the seconds of a step by the number of steps in a call."""
    dataset = tf.data.Dataset.from_tensors(batches[0])
    for batch in batches[1:]:
        if tf.data.Dataset.from_tensors(batch).element_spec == dataset.element_spec:
            dataset = dataset.concatenate(tf.data.Dataset.from_tensors(batch))
    dataset = dataset.cache().repeat().prefetch(tf.data.AUTOTUNE)
    dataset = model.distribute_strategy.experimental_distribute_dataset(dataset)
    runs = {}
    for size in sizes:
        with replaced(model, steps_per_execution=size):
            function = around_training.on_iterator(model)
            iterator = iter(dataset)
            function(iterator)  # traced here
        runs[size] = (function, iterator)
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    for _, (size, run) in itertools.product(range(_ROUNDS), runs.items()):
        with replaced(model, steps_per_execution=size):
            seconds[size].append(_step_seconds(run, size))
    return {size: min(each) for size, each in seconds.items()}


def _step_seconds(run: tuple[Any, Any], size: int) -> float:
    function, iterator = run
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS or calls < 2:
        logs = function(iterator)
        for leaf in tf.nest.flatten(logs)[:1]:
            float(leaf)  # waits for the device, as callbacks do
        calls += 1
    return (time.perf_counter() - began) / (calls * size)
