"""A checksum of a state, by which two processes compare every bit of it."""

import hashlib

import numpy as np

from tfamp.stepping.snapshots.state import State

# What a loss scale only reports, and metrics, which the logs tell of: they have no
# variables before they are used. See `tfamp.stepping.snapshots.names`.
_LEFT_OUT = ("record/", "metrics/")


def digest(state: State) -> str:
    """Returns a checksum of weights, statistics, seeds, slots and counters.

    One NaN is as good as another: which bits a NaN has is not the model's doing.

    Example:
        >>> quiet = np.array([np.nan], np.float32)
        >>> other = (quiet.view(np.uint32) | 1).view(np.float32)
        >>> digest(State({"w": quiet}, {})) == digest(State({"w": other}, {}))
        True
    """
    total = hashlib.sha256()
    for name in sorted(state.arrays):
        if name.startswith(_LEFT_OUT):
            continue
        array = np.ascontiguousarray(state.arrays[name])
        total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        total.update(_plain(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array whose NaNs have all the same bits."""
    if array.dtype.kind in "biuOSU":
        return array
    is_nan = np.isnan(array)
    if not is_nan.any():
        return array
    plain = array.copy()
    plain[is_nan] = np.nan
    return plain
