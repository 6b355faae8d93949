"""The batches of `fit`, drawn in Python, where they can be timed and kept.

From an iterator of TensorFlow Keras draws inside the traced function, out of Python's
sight; from any other one it draws in Python, ahead of each step, as it does for
`train_on_batch`. Nothing is drawn twice, elsewhere or earlier than without it, and the
step is the same function.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Draws:
    """An iterator over what a function draws, for one call of a training function.

    The first batch is drawn at once, so that the end of the data shows as it does in
    Keras's own function: a StopIteration ahead of the step. `source` is what the
    function draws from.
    """

    def __init__(self, draw: Callable[[], Any], source: Any) -> None:
        self._draw, self._ahead = draw, [draw()]
        if isinstance(source, (tf.data.Iterator, Draws)):
            self.element_spec = getattr(source, "element_spec", None)

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next batch."""
        return self._ahead.pop() if self._ahead else self._draw()


def can_draw(model: keras.Model) -> bool:
    """Returns whether a model's training function takes any iterator.

    One of the user's own may count on an iterator of TensorFlow, and several workers
    have to trace the same step alike.
    """
    is_own = type(model).make_train_function is not keras.Model.make_train_function
    return not is_own and not has_workers(model)


def has_workers(model: keras.Model) -> bool:
    """Returns whether a model trains on several workers."""
    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(model.distribute_strategy, kind)


def parts_of(model: keras.Model, data: Any) -> tuple[Any, ...]:
    """Returns for each replica its part of a batch, as its `train_step` gets it."""
    local = model.distribute_strategy.experimental_local_results
    leaves = [local(leaf) for leaf in tf.nest.flatten(data)]

    def part(number: int) -> Any:
        chosen = [parts[number % len(parts)] for parts in leaves]
        # Keras turns empty optionals to None.
        plain = [None if isinstance(x, tf.experimental.Optional) else x for x in chosen]
        return tf.nest.pack_sequence_as(data, plain)

    return tuple(map(part, range(max((len(parts) for parts in leaves), default=1))))


def whole(parts: tuple[Any, ...]) -> Any:
    """Returns a batch of all replicas as one."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts
    )


def num_rows(model: keras.Model, data: Any) -> int:
    """Returns the number of examples in a batch of all replicas; 0 where unknown.

    That of the first part with more than a number in it, in the order of `tf.nest`: of
    the inputs, where the batch is `(x, y, sample_weight)`.
    """
    local = model.distribute_strategy.experimental_local_results
    for leaf in tf.nest.flatten(data):
        parts = local(leaf)
        if all(getattr(getattr(part, "shape", None), "rank", 0) for part in parts):
            return sum(int(part.shape[0] or tf.shape(part)[0]) for part in parts)
    return 0


def num_bytes(data: Any) -> int:
    """Returns the size of the tensors in a batch."""

    def size(leaf: Any) -> int:
        if not tf.is_tensor(leaf) or leaf.dtype == tf.variant:
            return 0
        if leaf.dtype == tf.string:
            return sum(map(len, np.ravel(leaf.numpy()))) + leaf.shape.num_elements()
        return int(leaf.shape.num_elements() * leaf.dtype.size)

    return sum(map(size, tf.nest.flatten(data, expand_composites=True)))
