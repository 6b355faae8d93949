"""The batches of `fit`, drawn in Python, where they can be timed and kept.

From an iterator of TensorFlow Keras draws inside the traced function, out of Python's
sight; from any other one it draws in Python, ahead of each step, as it does for
`train_on_batch`. Keras 3.16 always does so where a call is one step. Nothing is drawn
twice, elsewhere or earlier than without it, and the step is the same function.
"""

import collections
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Kept(NamedTuple):
    """A batch that is kept.

    Attributes:
        number: How many batches were drawn before it.
        data: The batch, as it was drawn.
        num_bytes: Its size.
    """

    number: int
    data: Any
    num_bytes: int


# What may be held of batches since the last good state, in number and size.
_MAX_KEPT, _MAX_BYTES = 1000, 2**28


class BatchesSince:
    """Holds the batches that were trained since a good state, the newest at least.

    They are held on their way, without a copy. `num_drawn` counts all of them.
    """

    def __init__(self, model: keras.Model) -> None:
        self.num_drawn = 0
        self._model, self._can_draw = model, can_draw(model)
        self._kept: collections.deque[Kept] = collections.deque()
        self._num_bytes = 0

    def through(self, iterator: Any) -> Any:
        """Returns what a call of the training function is to draw from.

        StopIteration says that there is no batch left.
        """
        if not self._can_draw:
            return iterator
        return Draws(lambda: self._hold(next(iterator)), iterator)

    def begin_at(self, number: int) -> None:
        """Forgets the batches before a number, which `num_drawn` was then."""
        while self._kept and self._kept[0].number < number:
            self._num_bytes -= self._kept.popleft().num_bytes

    def kept(self) -> list[Kept]:
        """Returns the batches that are held, the oldest first."""
        return list(self._kept)

    def clear(self) -> None:
        """Lets all batches go."""
        self._kept.clear()
        self._num_bytes = 0

    def _hold(self, data: Any) -> Any:
        leaves = tf.nest.flatten(data, expand_composites=True)
        each = Kept(self.num_drawn, data, sum(map(_size_of, leaves)))
        self._kept.append(each)
        self.num_drawn += 1
        self._num_bytes += each.num_bytes
        while len(self._kept) > _MAX_KEPT or (
            self._num_bytes > _MAX_BYTES and len(self._kept) > 1
        ):
            self._num_bytes -= self._kept.popleft().num_bytes
        return data


def parts_of(model: keras.Model, data: Any) -> tuple[Any, ...]:
    """Returns for each replica its part of a batch, as its `train_step` gets it."""
    local = model.distribute_strategy.experimental_local_results
    leaves = [local(leaf) for leaf in tf.nest.flatten(data)]
    num_parts = max((len(parts) for parts in leaves), default=1)
    each = [[parts[i % len(parts)] for parts in leaves] for i in range(num_parts)]
    return tuple(
        tf.nest.map_structure(_none_or, tf.nest.pack_sequence_as(data, part))
        for part in each
    )


def whole(parts: tuple[Any, ...]) -> Any:
    """Returns a batch of all replicas as one."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts
    )


def holds_nonfinite(batch: Any) -> bool:
    """Returns whether a batch holds NaN or inf."""
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
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
            return sum(_rows(part) for part in parts)
    return 0


def _rows(part: Any) -> int:
    if isinstance(part, tf.SparseTensor):
        return int(part.dense_shape[0])
    return int(part.nrows() if isinstance(part, tf.RaggedTensor) else part.shape[0])


def _none_or(leaf: Any) -> Any:
    """Returns a leaf as Keras hands it on, which turns empty optionals to None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _size_of(leaf: Any) -> int:
    if not tf.is_tensor(leaf) or leaf.dtype == tf.variant:
        return 0
    if leaf.dtype == tf.string:
        return sum(map(len, np.ravel(leaf.numpy()))) + leaf.shape.num_elements()
    return int(leaf.shape.num_elements() * leaf.dtype.size)
