"""Which sequence goes into which batch: lengths in, boundaries and sizes out.

A bucket holds the sequences up to a length, its boundary; they are padded to it. So
there are as many shapes as buckets, and XLA compiles each of them once.
"""

import dataclasses

import numpy as np

# Tensor cores and XLA's tiles take dimensions in steps of this.
LENGTH_MULTIPLE = 8
# Each shape is compiled once, and has a batch of its own that is not full.
DEFAULT_MAX_SHAPES = 8
# Boundaries to choose from; the search takes the square of it.
_MAX_CANDIDATES = 2048


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets, and what is known of the lengths that go into them."""

    # The longest length of each bucket, ascending: what it is padded to.
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    # Share of all places that is padding, None if lengths were not read; and the same
    # if all sequences were padded to the longest.
    waste: float | None = None
    waste_of_one_shape: float | None = None
    # Sequences above the last boundary.
    num_too_long: int = 0


def choose_boundaries(
    lengths: np.ndarray, *, multiple: int = LENGTH_MULTIPLE, max_shapes: int
) -> tuple[int, ...]:
    """Returns the boundaries with the least padding.

    The least over all sets of at most `max_shapes` multiples of `multiple`, by
    dynamic programming over the histogram of lengths: the best last bucket goes
    with the best buckets below it. Above 2,048 distinct multiples (lengths of more
    than 16,384 at the default) they are taken in steps twice as wide, and so on.

    Example:
        >>> choose_boundaries(np.array([3, 5, 7, 30, 31, 90]), max_shapes=2)
        (32, 96)
        >>> choose_boundaries(np.array([3, 5, 7, 30, 31, 90]), max_shapes=3)
        (8, 32, 96)

    Source: Bellman, On the approximation of curves by line segments using dynamic
    programming, 1961, with the padding of a segment as its cost.
    """
    step = multiple
    rounded = _round_up(lengths, step)
    while len(np.unique(rounded)) > _MAX_CANDIDATES:
        step *= 2
        rounded = _round_up(lengths, step)
    values, counts = np.unique(rounded, return_counts=True)
    # below[i]: sequences in the first i values; a bucket of values i to j - 1 has
    # below[j] - below[i] of them, each of which takes values[j - 1] places.
    below = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    num_values = len(values)
    places = values[None, :] * (below[None, 1:] - below[:-1, None])
    places[np.tril_indices(num_values, -1)] = np.inf
    # least[i]: fewest places for the first i values in the buckets so far.
    least = np.concatenate([[0.0], np.full(num_values, np.inf)])
    starts = []
    for _ in range(min(max_shapes, num_values)):
        total = least[:-1, None] + places
        starts.append(np.argmin(total, axis=0))
        least = np.concatenate([[np.inf], np.min(total, axis=0)])
    boundaries, end = [], num_values
    for start in reversed(starts):
        boundaries.append(int(values[end - 1]))
        end = int(start[end - 1])
    return tuple(reversed(boundaries))


def sizes_of_batches(
    boundaries: tuple[int, ...], *, batch_size: int | None, token_budget: int | None
) -> tuple[int, ...]:
    """Returns how many sequences of each bucket make a batch.

    That is `batch_size` for all, or what `token_budget` has places for, padding
    included, rounded down to a multiple of 8 where there are 8 or more.

    Example:
        >>> sizes_of_batches((8, 48, 96), batch_size=None, token_budget=512)
        (64, 8, 5)
    """
    if batch_size is not None:
        return (batch_size,) * len(boundaries)
    sizes = ((token_budget or 0) // boundary for boundary in boundaries)
    return tuple(
        size - size % LENGTH_MULTIPLE if size >= LENGTH_MULTIPLE else max(1, size)
        for size in sizes
    )


def plan_of(
    lengths: np.ndarray | None,
    boundaries: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    *,
    keeps_too_long: bool = False,
) -> BucketPlan:
    """Returns the plan, with its waste where lengths are known.

    Sequences above the last boundary are cut to it if `keeps_too_long`; else they are
    not there.

    Example:
        >>> plan_of(np.array([2, 8, 12]), (8, 16), (4, 4)).waste  # 10 of 32 places
        0.3125
    """
    if lengths is None:
        return BucketPlan(boundaries, batch_sizes)
    is_too_long = lengths > boundaries[-1]
    kept = np.minimum(lengths, boundaries[-1])
    if not keeps_too_long:
        kept = kept[~is_too_long]
    counts = np.bincount(np.searchsorted(boundaries, kept), minlength=len(boundaries))
    used = float(kept.sum())
    places = float(counts @ np.asarray(boundaries))
    one_shape = float(len(kept) * boundaries[-1])
    return BucketPlan(
        boundaries,
        batch_sizes,
        1 - used / places if places else 0.0,
        1 - used / one_shape if one_shape else 0.0,
        int(is_too_long.sum()),
    )


def check_budget(token_budget: int, boundaries: tuple[int, ...]) -> None:
    """Raises if a batch has no room for one of the longest sequences."""
    if token_budget < boundaries[-1]:
        raise ValueError(
            f"`token_budget` is {token_budget}, and the longest sequences are padded "
            f"to {boundaries[-1]}; expected room for one at least. Raise it, or cut "
            "sequences with `boundaries=` and `too_long='truncate'`."
        )


def _round_up(lengths: np.ndarray, step: int) -> np.ndarray:
    """Returns lengths as multiples of `step`, of at least one step."""
    return np.maximum(-(-lengths.astype(np.int64) // step), 1) * step
