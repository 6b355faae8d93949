"""The batch that training failed on, for the triage.

In `fit` the traced function draws its batches out of Python's sight, so they are held
on their way. A `FlightRecorder` in the same `fit` holds them already.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.callbacks import _batch_ring
from tfamp.callbacks._timed_iterator import ITERATORS, TimedIterator


class LastBatches:
    """Holds the batches of the last call of a training function.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._steps = int(model.steps_per_execution or 1)
        self._ring: _batch_ring.BatchRing | None = None
        self._iterator: Any = None
        self._held: Any = None
        self._num_calls, self._is_sized = 0, False

    def through(self, iterator: Any, *, is_held: bool) -> Any:
        """Returns what the training function is to draw from.

        Args:
            iterator: What `fit` gave.
            is_held: Whether a `FlightRecorder` holds the batches already.
        """
        if self._iterator is not iterator:
            self._iterator = self._held = iterator
            if isinstance(iterator, ITERATORS) and not is_held:
                if self._ring is None:
                    strategy = self._model.distribute_strategy
                    self._ring = _batch_ring.BatchRing(strategy, keep=self._steps)
                self._held = TimedIterator(iterator, self._ring)
        return self._held

    def let_go(self) -> None:
        """Lets older batches go, every few calls; all at once, which is the cheapest.

        To be called before the training function: what it draws is held then.
        """
        if self._ring is None:
            return
        if not self._num_calls:
            self._ring.clear()
        elif not self._is_sized:
            self._ring.fetch()  # it learns their size, and so how many may pile up
            self._is_sized = True
        self._num_calls += 1
        if self._num_calls > max(1, self._ring.calls_between // self._steps):
            self._num_calls = 0

    def failing(self) -> Any:
        """Returns the last batch with NaN or inf in it, else the last; None without."""
        ring = self._ring or _batch_ring.ring_in_use(self._model)
        kept = ring.batches() if ring is not None else []
        batches = [_whole(each.parts) for each in kept[-self._steps :]]
        bad = [batch for batch in batches if _has_nonfinite(batch)]
        return (bad or batches or [None])[-1]

    def clear(self) -> None:
        """Lets all batches go."""
        if self._ring is not None:
            self._ring.clear()
        self._iterator = self._held = None


def _whole(parts: tuple[Any, ...]) -> Any:
    """Returns a batch of all replicas as one."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts
    )


def _has_nonfinite(batch: Any) -> bool:
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
    )
