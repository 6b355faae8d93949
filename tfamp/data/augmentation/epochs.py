"""Which epoch a dataset is in, counted where whole passes end."""

import dataclasses
import threading
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length, with_length_of
from tfamp.data.stages.base import Settings, Stage


class EpochCounter:
    """Counts the passes over one dataset that gave their last element.

    One that was left early, as a look at the first batch is, does not count.

    Args:
        epoch: What to begin with.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()

    def read(self) -> np.int64:
        """Returns the number of the epoch that begins."""
        return np.int64(self._epoch)

    def finish(self, epoch: np.int64) -> np.int64:
        """Notes that an epoch has given its last element; twice does no harm."""
        with self._lock:
            self._epoch = max(self._epoch, int(epoch) + 1)
        return epoch

    def number(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns triples (epoch, index, element); the length stays known."""

        # A call into Python at the first element only.
        def endless(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(self._read_tensor()).repeat()

        epochs = tf.data.Dataset.range(1).flat_map(endless)
        numbered = tf.data.Dataset.zip(epochs, dataset.enumerate())
        numbered = with_length_of(dataset, numbered)
        return numbered.map(lambda epoch, item: (epoch, *item))

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset; that it was read to its end is noted here."""
        length = known_length(dataset)
        if length is None:
            # Whose end is not known, is read until there is no more.
            last = tf.data.Dataset.range(1).filter(
                lambda _: self._finish_tensor(self._read_tensor()) < 0
            )
            return dataset.concatenate(last.flat_map(lambda _: dataset.take(0)))

        # Where it is known, readers such as `fit` stop at the last element.
        def step(epoch: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
            index, element = item
            epoch = tf.cond(index == 0, self._read_tensor, lambda: epoch)
            is_last = index == length - 1
            epoch = tf.cond(is_last, lambda: self._finish_tensor(epoch), lambda: epoch)
            return epoch, element

        return dataset.enumerate().scan(tf.constant(0, tf.int64), step)

    def _read_tensor(self) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(self.read, [], tf.int64), ())

    def _finish_tensor(self, epoch: tf.Tensor) -> tf.Tensor:
        found = tf.numpy_function(self.finish, [epoch], tf.int64)
        return tf.ensure_shape(found, ())


@dataclasses.dataclass(frozen=True)
class CountEpochs(Stage):
    """Notes where whole passes end, behind everything that reads ahead.

    A look at the first batch lets a prefetch read on, to the end of a small dataset.
    Only what leaves the pipeline tells whether an epoch was used.

    Attributes:
        counter: Shared with the stage that acts by epochs.
        first: Number of the first epoch.
    """

    name: ClassVar[str] = "epochs"
    counter: EpochCounter = dataclasses.field(compare=False)
    first: int

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset, counted."""
        return self.counter.count(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return f"counted from {self.first}", "whole passes; each has its own changes"
