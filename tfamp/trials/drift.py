"""How far the weights of a run ended from those of another one."""

from pathlib import Path

import numpy as np


def drift(reference: Path, other: Path) -> float | None:
    """Returns how far a run's weights ended from the reference's, as a part of its way.

    The distance between the ends over the distance that the reference went from its
    start, both over all trainable weights: 0 for the same weights, about 1 where the
    two have nothing but the start in common. float32 with another order of sums
    drifts as well, the more the longer it trains.

    Args:
        reference: Weights before and after of the reference.
        other: Of the other run, with the same seed.

    Returns:
        None where one of them is missing, where the shapes differ, or where the
        reference did not move.
    """
    if not (reference.is_file() and other.is_file()):
        return None
    with np.load(reference) as first, np.load(other) as second:
        count = sum(name.startswith("after") for name in first.files)
        apart = way = 0.0
        for i in range(count):
            end = first[f"after_{i}"].astype(np.float64)
            if f"after_{i}" not in second or second[f"after_{i}"].shape != end.shape:
                return None
            apart += float(np.sum((second[f"after_{i}"] - end) ** 2))
            way += float(np.sum((end - first[f"before_{i}"]) ** 2))
    return (apart / way) ** 0.5 if way > 0 else None
