"""Cuts a batch, of one replica or several, into micro-batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf


class CannotSplit(ValueError):
    """A batch that has no examples to tell apart, or arrays of other lengths."""


def without_optionals(data: Any) -> Any:
    """Returns a batch with None where a distributed one has an empty optional."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def sizes(strategy: tf.distribute.Strategy, data: Any) -> tuple[int, ...]:
    """Returns the number of examples that each replica has of a batch.

    Raises:
        CannotSplit: The batch is made of arrays of several lengths, or of none.
    """
    found: tuple[int, ...] | None = None
    for leaf in tf.nest.flatten(data):
        parts = strategy.experimental_local_results(leaf)
        if any(part is None or part.shape.rank == 0 for part in parts):
            continue
        lengths = tuple(map(_length, parts))
        if found is None:
            found = lengths
        elif found != lengths:
            raise CannotSplit(
                f"its arrays have {found} and {lengths} rows on the replicas; expected "
                "one row for each example in all of them"
            )
    if found is None:
        raise CannotSplit("it holds no array; expected one with a row for each example")
    return found


def num_parts(examples: Sequence[int], limit: int | None, most: int) -> int:
    """Returns into how many micro-batches a batch goes.

    Args:
        examples: Examples of the batch on each replica.
        limit: Most examples that a replica may have at once; None for any number.
        most: Largest number of micro-batches.

    Example:
        >>> num_parts([512], 128, 64), num_parts([100], 128, 64), num_parts([7], 2, 64)
        (4, 1, 4)
        >>> num_parts([2, 1], 1, 64)  # none is left without an example
        1
    """
    if limit is None:
        return 1
    return max(1, min(-(-max(examples) // limit), min(examples), most))


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns where each part of a sequence begins and ends; lengths differ by 1.

    Example:
        >>> bounds(7, 3)
        [(0, 2), (2, 4), (4, 7)]
    """
    edges = [length * i // parts for i in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def cut(
    strategy: tf.distribute.Strategy, data: Any, examples: Sequence[int], parts: int
) -> Iterator[Any]:
    """Yields micro-batches, each with its share of the examples of its replica.

    Args:
        strategy: The model's.
        data: A batch.
        examples: What `sizes` returned of it.
        parts: How many micro-batches.

    Yields:
        Pairs of a batch and a float32 scalar in (0, 1], both of all replicas.
    """
    edges = [bounds(length, parts) for length in examples]
    for number in range(parts):
        pieces = []
        for replica, length in enumerate(examples):
            begin, end = edges[replica][number]
            local = tf.nest.map_structure(
                lambda leaf, r=replica, b=begin, e=end: _rows(
                    _local(strategy, leaf, r), b, e
                ),
                data,
            )
            share = tf.constant((end - begin) / length, tf.float32)
            pieces.append((local, share))
        yield pieces[0] if len(pieces) == 1 else _joined(strategy, pieces)


def _joined(strategy: tf.distribute.Strategy, pieces: Sequence[Any]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda context: pieces[context.replica_id_in_sync_group]
    )


def _local(strategy: tf.distribute.Strategy, leaf: Any, replica: int) -> Any:
    parts = strategy.experimental_local_results(leaf)
    return parts[replica % len(parts)]


def _length(part: Any) -> int:
    if isinstance(part, tf.RaggedTensor):
        return int(part.nrows())
    if isinstance(part, tf.SparseTensor):
        return int(part.dense_shape[0])
    return int(part.shape[0])


def _rows(leaf: Any, begin: int, end: int) -> Any:
    """Returns rows of a tensor; numbers belong to each example alike."""
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
        size = tf.concat([[end - begin], shape[1:]], 0)
        return tf.sparse.slice(leaf, start, tf.cast(size, tf.int64))
    return leaf[begin:end]
