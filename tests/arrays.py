"""Compares arrays, one after the other."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np


def assert_close(
    found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Fails where arrays differ by more than a tolerance, or at all without one.

    Models stand for their weights.
    """
    pairs = zip(_arrays(found), _arrays(expected), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def _arrays(given: Any) -> Iterable[Any]:
    return given.get_weights() if isinstance(given, keras.Model) else given
