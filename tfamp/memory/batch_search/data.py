"""A batch of the data, which is all that a trial needs of it."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.stepping.arguments import checked_dataset, first_batch

# What `fit` takes of arrays by default, and how many rows of them a trial gets.
_FIT_BATCH_SIZE = 32
_MAX_ROWS = 1024


class Batch(NamedTuple):
    """A batch of the data, and what is known of the rest.

    Attributes:
        parts: What `fit` takes as one element of a dataset.
        size: Examples in a batch of the data, for arrays what `fit` takes by default.
        num_examples: About how many the data has, None where that is not known.
    """

    parts: Any
    size: int
    num_examples: int | None


def batch_of(data: Any) -> Batch:
    """Returns one batch of the data.

    Args:
        data: A dataset of batches, a `Pipeline`, a `PyDataset`, or arrays (x, y).

    Raises:
        TypeError: It is something else.
        ValueError: It is empty, or comes in single examples.

    Example:
        >>> batch_of(tf.data.Dataset.range(96).batch(8))[1:]
        (8, 96)
    """
    if isinstance(data, tuple):
        return _of_arrays(data)
    if isinstance(data, keras.utils.PyDataset):
        batch = data[0] if len(data) else None
        if batch is None:
            raise ValueError(
                "`data` holds no batches; expected at least one. Look at its source: a "
                "wrong path, split or filter leaves nothing."
            )
        parts = tf.nest.map_structure(tf.convert_to_tensor, tuple(batch))
        return Batch(parts, _num_rows(parts), len(data) * _num_rows(parts))
    dataset = checked_dataset(data)
    batch = first_batch(dataset)
    size = _num_rows(batch)
    number = int(dataset.cardinality())
    # Below 0: unknown, or without an end.
    return Batch(batch, size, number * size if number >= 0 else None)


def _of_arrays(data: tuple[Any, ...]) -> Batch:
    data = tuple(part for part in data if part is not None)
    numbers = {len(array) for array in tf.nest.flatten(data)}
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError(
            f"The arrays of `data` have {tuple(sorted(numbers))!r} rows; expected the "
            "same number in all of them, and at least one. Pass (x, y), row by row."
        )
    (number,) = numbers
    parts = tf.nest.map_structure(
        lambda each: tf.convert_to_tensor(each[:_MAX_ROWS]), data
    )
    return Batch(parts, min(_FIT_BATCH_SIZE, number), number)


def _num_rows(batch: Any) -> int:
    first = tf.nest.flatten(batch)[0]
    return int(first.shape[0] or tf.shape(first)[0])
