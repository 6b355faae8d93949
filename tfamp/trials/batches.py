"""One batch of anything that `fit` takes, and batches of any size made of its rows."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.stepping.arguments import arrays_of, dataset_of, first_batch

# What `fit` takes of arrays by default, and how many rows of them are kept.
_FIT_BATCH_SIZE, _MAX_ROWS = 32, 1024


class Batch(NamedTuple):
    """A batch as `fit` takes it, and what is known of the rest.

    `size` counts its examples, of arrays what `fit` takes by default; `num_examples`
    about those of the data, None where that is not known.
    """

    parts: Any
    size: int
    num_examples: int | None


def batch_of(data: Any) -> Batch:
    """Returns one batch of anything that `fit` takes."""
    arrays = arrays_of(data, needs_targets=False)
    if arrays is not None:
        number = len(tf.nest.flatten(arrays)[0])
        arrays = tf.nest.map_structure(lambda each: each[:_MAX_ROWS], arrays)
        parts = first_batch(dataset_of(arrays, _MAX_ROWS, needs_targets=False))
        return Batch(parts, min(_FIT_BATCH_SIZE, number), number)
    dataset = dataset_of(data)
    parts, length = first_batch(dataset), known_length(dataset)
    first = tf.nest.flatten(parts)[0]
    size = int(first.shape[0] or tf.shape(first)[0])
    return Batch(parts, size, None if length is None else length * size)


def as_fit_takes_it(data: Any) -> Any:
    """Returns arrays as a tuple, a `PyDataset` as it is, all else as a dataset."""
    if data is None or isinstance(data, keras.utils.PyDataset):
        return data
    arrays = arrays_of(data, needs_targets=False)
    return dataset_of(data) if arrays is None else arrays


def rows(tensor: Any, size: int) -> Any:
    """Returns `size` rows of a tensor, its own again and again."""
    count = int(tensor.shape[0] or tf.shape(tensor)[0])
    return tf.gather(tensor, np.arange(size) % count)
