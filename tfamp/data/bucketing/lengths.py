"""Reads the lengths of sequences in one pass."""

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data._stages import Settings, map_in_order
from tfamp.data.bucketing.padding import Padder
from tfamp.records.progress import progress

# Lengths brought to Python at once.
_LENGTHS_AT_ONCE = 1024


def read_lengths(
    dataset: tf.data.Dataset, padder: Padder, settings: Settings
) -> np.ndarray:
    """Returns the length of every element, with a progress bar if it takes long."""
    lengths = map_in_order(dataset, padder.length_of, settings)
    read, done = [], 0
    with progress("Reading lengths", known_length(dataset)) as update:
        for batch in lengths.batch(_LENGTHS_AT_ONCE).as_numpy_iterator():
            read.append(batch)
            done += len(batch)
            update(done)
    if not read:
        raise ValueError(
            "The dataset has no elements to read the length of; expected at least "
            "one. Check the files or the filter before it."
        )
    return np.concatenate(read)
