"""Rounds numbers to the compute dtype as Keras does on the way into a layer."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.records import checks
from tfamp.records.formats import FORMATS, Format

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
_POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A compute dtype, and what its layers get of a number.

    Attributes:
        format: What the compute dtype can hold.

    Example:
        >>> Rounding(FORMATS["float16"])(np.array([2049.0, 1e5, 1e-9])).tolist()
        [2048.0, inf, 0.0]
    """

    format: Format

    @property
    def name(self) -> str:
        """The compute dtype."""
        return self.format.name

    @property
    def max_integer(self) -> int:
        """Up to here, in both directions, every integer is held exactly."""
        return 2 ** (self.format.mantissa_bits + 1)

    @property
    def unit(self) -> float:
        """Largest relative error of rounding a number in the normal range."""
        return self.format.epsilon / 2

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Returns values rounded to the compute dtype, in float64.

        By way of float32, which is what `fit` and Keras's inputs make of float64 and
        of integers first.
        """
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            single = values.astype(np.float32)
            dtype = tf.as_dtype(self.name).as_numpy_dtype
            return single.astype(dtype).astype(np.float64)


def rounding_for(compute_dtype: Any) -> Rounding:
    """Returns the rounding of a dtype or a policy.

    Args:
        compute_dtype: "float32", "float16", "bfloat16", a policy's name such as
            "mixed_float16", or a `keras.DTypePolicy`.

    Raises:
        TypeError: It is neither text nor a policy.
        ValueError: It is another dtype.

    Example:
        >>> rounding_for("mixed_bfloat16").name
        'bfloat16'
    """
    name = getattr(compute_dtype, "compute_dtype", compute_dtype)
    options = (*COMPUTE_DTYPES, *_POLICIES)
    name = checks.choice("compute_dtype", name, options)
    return Rounding(FORMATS[_POLICIES.get(name, name)])
