"""The batches of a bundle as an iterator that a training function draws from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.stepping.bundles.files import Contents
from tfamp.stepping.bundles.packing import array_of, leaves, repack, unpack
from tfamp.stepping.bundles.record import Batch, Call


def part_of(contents: Contents, number: int, replica: int = 0) -> Any:
    """Returns the part of a batch that a replica trained on.

    Args:
        contents: The bundle.
        number: Batches that were drawn before this one.
        replica: Which replica.

    Raises:
        ValueError: The batch is not kept.
    """
    parts = _batch(contents, number).parts
    return unpack(parts[replica], contents.batches)


def iterator_of(
    contents: Contents, calls: Sequence[Call], strategy: tf.distribute.Strategy
) -> Any:
    """Returns an iterator over the batches of some calls in a row.

    Its batches have the shapes that the graph knew then: a dimension that is known is
    folded into constants, and that can change a bit.

    Args:
        contents: The bundle.
        calls: The calls.
        strategy: That of the model; each replica gets its part again.
    """
    batches = [
        _batch(contents, number)
        for call in calls
        for number in range(call.first, call.first + call.num_batches)
    ]
    parts = [part for batch in batches for part in batch.parts]
    template = parts[0]
    signature = tuple(
        tf.TensorSpec(_common([leaf["graph_shape"] for leaf in same]), same[0]["dtype"])
        for same in zip(*map(leaves, parts), strict=True)
    )

    def generate() -> Iterator[tuple[np.ndarray, ...]]:
        for part in parts:
            yield tuple(array_of(leaf, contents.batches) for leaf in leaves(part))

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    dataset = dataset.map(lambda *flat: repack(template, list(flat)))
    if strategy.num_replicas_in_sync == 1:
        return iter(strategy.experimental_distribute_dataset(dataset))
    return iter(strategy.distribute_datasets_from_function(lambda context: dataset))


def _batch(contents: Contents, number: int) -> Batch:
    for batch in contents.record.batches:
        if batch.number == number:
            return batch
    kept = tuple(batch.number for batch in contents.record.batches)
    raise ValueError(
        f"Batch {number} is not in the bundle, which keeps {kept!r}; expected every "
        "batch of its calls. Take another bundle."
    )


def _common(shapes: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the shape that all of some shapes have, None where they differ.

    Example:
        >>> _common([[4, 3], [2, 3]])
        (None, 3)
    """
    pairs: Mapping[int, set[Any]] = dict(enumerate(map(set, zip(*shapes, strict=True))))
    return tuple(sizes.pop() if len(sizes) == 1 else None for sizes in pairs.values())
