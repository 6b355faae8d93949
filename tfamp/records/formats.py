"""What float16, bfloat16 and float32 can hold; nothing here needs TensorFlow."""

import math
from typing import NamedTuple

# The dtypes of half precision, by which a layer computes in it.
HALF = ("float16", "bfloat16")
# As `tfamp.enable` takes them. They stand here since the doctor judges them where Keras
# may be what is broken; a test holds them equal to those of `dtypes.settings`.
POLICIES = (
    *("auto", "float32", "mixed_float16", "mixed_bfloat16"),
    *("float16", "bfloat16"),
)


class Format(NamedTuple):
    """A binary floating-point format, by its bits; the implicit one is left out."""

    name: str
    mantissa_bits: int
    max_exponent: int  # of a finite number

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def max(self) -> float:
        """Largest finite number."""
        return math.ldexp(2.0 - self.epsilon, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with the full relative precision."""
        return 2.0 ** (1 - self.max_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; half of it or less rounds to 0."""
        return self.smallest_normal * self.epsilon


FLOAT32, BFLOAT16 = Format("float32", 23, 127), Format("bfloat16", 7, 127)
FLOAT16 = Format("float16", 10, 15)
FORMATS = {format.name: format for format in (FLOAT32, BFLOAT16, FLOAT16)}


def spacing(format: Format, value: float) -> float:
    """Returns the distance from a finite `value` to the next number away from zero.

    An update of less than half of it leaves a weight of that value unchanged.
    """
    if abs(value) < format.smallest_normal:
        return format.smallest_subnormal
    return math.ldexp(format.epsilon, math.frexp(value)[1] - 1)


def needs_loss_scale(format: Format) -> bool:
    """States whether gradients in this format vanish without a loss scale."""
    return format.max_exponent < FLOAT32.max_exponent
