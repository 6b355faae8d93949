"""Batches that fit, added up to the batch of one update."""

import math
from typing import NamedTuple


class Split(NamedTuple):
    """A way to make up one update.

    Attributes:
        batch_size: Examples of a step, on all replicas.
        steps: Steps of an update.
    """

    batch_size: int
    steps: int


def splits(largest: int, target: int, *, replicas: int = 1) -> tuple[Split, ...]:
    """Returns ways to make up updates of `target` examples, the best first.

    First comes the largest batch that goes into the target without a rest, a multiple
    of 8 if there is one in reach; smaller than half of `largest` it is too slow to be
    worth that. Then the batch that comes closest in as few steps as can be, and last
    the largest itself.

    Args:
        largest: The most examples of a step.
        target: Examples of one update.
        replicas: A batch is a multiple of it.

    Example:
        >>> splits(96, 512)[0]
        Split(batch_size=64, steps=8)
        >>> splits(96, 509)
        (Split(batch_size=85, steps=6), Split(batch_size=96, steps=6))
        >>> splits(96, 64)[0]
        Split(batch_size=64, steps=1)
    """
    fewest = math.ceil(target / largest)
    exact = [
        Split(target // steps, steps)
        for steps in range(fewest, 2 * fewest + 1)
        if target % steps == 0 and (target // steps) % replicas == 0
    ]
    aligned = [split for split in exact if split.batch_size % 8 == 0]
    found = [*aligned[:1], *exact[:1]]
    nearest = max(1, round(target / fewest / replicas)) * replicas
    found += [Split(nearest, fewest), Split(largest, fewest)]
    return tuple(dict.fromkeys(found))
