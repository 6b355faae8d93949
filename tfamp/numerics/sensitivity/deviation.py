"""How far a low-precision result is from the float32 one, against what matters."""

import math
from collections.abc import Sequence

import numpy as np

# A spread of less than this part of the magnitude is that of a constant.
_CONSTANT = 1e-6


def spread(values: np.ndarray) -> float:
    """Returns how much numbers differ over the batch, as a root mean square.

    That is what the next layers learn from: of values around 1000 that differ by 1
    an error of 1 is all of it. Where nothing differs, or there is one example, it is
    the magnitude.

    Args:
        values: Numbers of shape (batch, ...).

    Example:
        >>> spread(np.array([[999.0], [1001.0]]))
        1.0
        >>> spread(np.array([[3.0, 4.0]])) == (12.5 ** 0.5)
        True
    """
    magnitude = _rms(values)
    if values.ndim < 1 or len(values) < 2:
        return magnitude
    around = _rms(values - values.mean(axis=0))
    return around if around > _CONSTANT * magnitude else magnitude


def forward_error(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns the error of outputs relative to their spread over the batch.

    Args:
        low: What came in low precision.
        exact: The same numbers in float32, of the same shape.

    Returns:
        inf where a number is not finite that is so in float32, 0 where nothing is
        wrong; numbers that are not finite in float32 either are left out.

    Example:
        >>> exact = np.array([[999.0], [1001.0]])
        >>> forward_error(exact + 0.5, exact), forward_error(exact * np.inf, exact)
        (0.5, inf)
    """
    low, exact = low.astype(np.float64), exact.astype(np.float64)
    usable = np.isfinite(exact)
    if not np.isfinite(low[usable]).all():
        return math.inf
    if not usable.all():
        low, exact = np.where(usable, low, 0.0), np.where(usable, exact, 0.0)
    scale = spread(exact)
    error = _rms(low - exact)
    # Against outputs that are all 0 nothing can be said to be large.
    return error / scale if scale else 0.0


def gradient_error(
    low: Sequence[np.ndarray | None], exact: Sequence[np.ndarray | None]
) -> float:
    """Returns the error of a layer's gradients, all of them together.

    A gradient that is 0 by its nature, such as that of a bias ahead of a
    normalization, is rounding noise on both sides and counts for nothing beside the
    others.

    Example:
        >>> noise, real = np.array([1e-9]), np.array([3.0, 4.0])
        >>> gradient_error([noise, real], [-noise, real]) < 1e-9
        True
        >>> gradient_error([real * np.nan], [real])
        inf
    """
    pairs = [
        (a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(low, exact, strict=True)
        if a is not None and b is not None and np.isfinite(b).all()
    ]
    if not all(np.isfinite(a).all() for a, _ in pairs):
        return math.inf
    error = sum(float(np.square(a - b).sum()) for a, b in pairs)
    size = sum(float(np.square(b).sum()) for _, b in pairs)
    return math.sqrt(error / size) if size else 0.0


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
