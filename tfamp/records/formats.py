"""What float16, bfloat16 and float32 can hold.

Every figure follows from two bit counts, so nothing here needs TensorFlow:

    >>> FLOAT16.max, BFLOAT16.epsilon
    (65504.0, 0.0078125)
"""

import dataclasses
import math

# The dtypes of half precision, by which a layer computes in it.
HALF = ("float16", "bfloat16")
# As `tfamp.enable` takes them. They stand here since the doctor judges them where Keras
# may be what is broken; a test holds them equal to those of `dtypes.settings`.
POLICIES = (
    *("auto", "float32", "mixed_float16", "mixed_bfloat16"),
    *("float16", "bfloat16"),
)


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format, by its bits; the implicit one is left out."""

    name: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        """What is taken from the stored exponent to get the true one."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def max(self) -> float:
        """Largest finite number."""
        return math.ldexp(2.0 - self.epsilon, self.bias)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with the full relative precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; half of it or less rounds to 0."""
        return self.smallest_normal * self.epsilon


FLOAT32 = Format("float32", exponent_bits=8, mantissa_bits=23)
BFLOAT16 = Format("bfloat16", exponent_bits=8, mantissa_bits=7)
FLOAT16 = Format("float16", exponent_bits=5, mantissa_bits=10)
FORMATS = {format.name: format for format in (FLOAT32, BFLOAT16, FLOAT16)}


def spacing(format: Format, value: float) -> float:
    """Returns the distance from `value` to the next number away from zero.

    An update of less than half of it leaves a weight of that value unchanged, which is
    why weights are kept in float32.

    Raises:
        ValueError: If `value` is not finite or beyond the format's largest number.

    Example:
        >>> spacing(FLOAT16, 1.0), spacing(FLOAT16, 2048.0)
        (0.0009765625, 2.0)
    """
    magnitude = abs(value)
    if not magnitude <= format.max:
        raise ValueError(
            f"`value` is {value!r}; expected a number that {format.name} can hold, "
            f"up to {format.max!r} in magnitude. Scale it down or use float32."
        )
    if magnitude < format.smallest_normal:
        return format.smallest_subnormal
    exponent = math.frexp(magnitude)[1] - 1
    return math.ldexp(format.epsilon, exponent)


def needs_loss_scale(format: Format) -> bool:
    """States whether gradients in this format vanish without a loss scale.

    Gradients are often below 2**-24, where float16 ends; a format with float32's
    exponent loses none of them (Micikevicius et al., Mixed Precision Training, 2018,
    section 3.2).
    """
    return format.exponent_bits < FLOAT32.exponent_bits
