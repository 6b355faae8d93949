"""The batches that were trained since a good state."""

import collections
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.callbacks._draws import Draws, can_draw, num_bytes


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
        each = Kept(self.num_drawn, data, num_bytes(data))
        self._kept.append(each)
        self.num_drawn += 1
        self._num_bytes += each.num_bytes
        while len(self._kept) > _MAX_KEPT or (
            self._num_bytes > _MAX_BYTES and len(self._kept) > 1
        ):
            self._num_bytes -= self._kept.popleft().num_bytes
        return data


def holds_nonfinite(batch: Any) -> bool:
    """Returns whether a batch holds NaN or inf."""
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
    )
