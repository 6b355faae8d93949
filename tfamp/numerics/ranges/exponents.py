"""Counts numbers by their exponent, and tells what of them a format would hold."""

import math

import numpy as np

from tfamp.numerics.ranges.result import Fit
from tfamp.records.formats import FLOAT32, Format

# Numbers are counted by exponent and the first bits of the mantissa, which is as fine
# as the largest numbers of both float8 formats need.
_MANTISSA_BITS = 4
_SHIFT = FLOAT32.mantissa_bits - _MANTISSA_BITS
_BINS = 2 ** (FLOAT32.exponent_bits + _MANTISSA_BITS)
_PER_EXPONENT = 2**_MANTISSA_BITS
_SPECIAL = 255  # exponent of inf and NaN


class Exponents:
    """Numbers counted by magnitude.

    Example:
        >>> counted = Exponents()
        >>> counted.add(np.float32([0, 1, 1.5, -3, 70000, np.inf]))
        >>> counted.by_exponent()
        {0: 2, 1: 1, 16: 1}
        >>> counted.zeros, counted.nonfinite, counted.largest
        (1, 1, 70000.0)
    """

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, np.int64)
        self.count, self.zeros, self.nonfinite = 0, 0, 0
        self.smallest, self.largest = math.inf, 0.0

    def add(self, values: np.ndarray) -> None:
        """Counts the numbers of an array; it is read as float32."""
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        magnitudes = np.abs(flat)
        bins = np.bincount(magnitudes.view(np.uint32) >> _SHIFT, minlength=_BINS)
        bins = bins[:_BINS]
        special = _SPECIAL * _PER_EXPONENT
        self.count += flat.size
        self.nonfinite += int(bins[special:].sum())
        bins[special:] = 0
        zeros = flat.size - int(np.count_nonzero(flat))
        self.zeros += zeros
        bins[0] -= zeros
        self._bins += bins
        if bins.any():
            usable = magnitudes[(magnitudes > 0) & (magnitudes < math.inf)]
            self.smallest = min(self.smallest, float(usable.min()))
            self.largest = max(self.largest, float(usable.max()))

    def merge(self, other: "Exponents") -> None:
        """Counts what another one has counted, too."""
        self._bins += other._bins
        self.count += other.count
        self.zeros += other.zeros
        self.nonfinite += other.nonfinite
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def usable(self) -> int:
        """How many numbers are finite and not 0."""
        return self.count - self.zeros - self.nonfinite

    def by_exponent(self) -> dict[int, int]:
        """Returns how many numbers lie in [2**e, 2**(e+1)), by e.

        Numbers below float32's smallest normal one count with 2**-127.
        """
        counts = self._bins.reshape(-1, _PER_EXPONENT).sum(axis=1)
        return {
            int(exponent) - FLOAT32.bias: int(counts[exponent])
            for exponent in np.flatnonzero(counts)
        }

    def in_format(self, format: Format, scale: float = 1.0) -> Fit:
        """Returns what a format does to the numbers times a scale, a power of two.

        Example:
            >>> from tfamp.records.formats import FLOAT16
            >>> counted = Exponents()
            >>> counted.add(np.float32([1e-9, 1e-6, 1, 1e6]))
            >>> counted.in_format(FLOAT16)
            Fit(format='float16', overflow=0.25, zero=0.25, coarse=0.25)
            >>> counted.in_format(FLOAT16, scale=2.0**10)
            Fit(format='float16', overflow=0.25, zero=0.0, coarse=0.25)
        """
        if not self.usable:
            return Fit(format.name, 0.0, 0.0, 0.0)
        over = first_overflow(format) / scale
        flushed = format.smallest_subnormal / 2 / scale
        normal = format.smallest_normal / scale
        num_over = int(self._bins[_bin(over) :].sum()) if self.largest >= over else 0
        # A half of the smallest number is rounded to 0, the even neighbour: numbers
        # just above it are taken for it, one sixteenth of a power of two.
        num_zero = int(self._bins[: _bin(flushed)].sum())
        num_coarse = int(self._bins[: _bin(normal)].sum()) - num_zero
        counts = (num_over, num_zero, num_coarse)
        return Fit(format.name, *(number / self.usable for number in counts))


def first_overflow(format: Format) -> float:
    """Returns the smallest magnitude that a format rounds to inf or NaN.

    Example:
        >>> from tfamp.records.formats import FLOAT16, FLOAT8_E5M2
        >>> first_overflow(FLOAT16), first_overflow(FLOAT8_E5M2)
        (65520.0, 61440.0)
    """
    exponent = math.frexp(format.max)[1] - 1
    return format.max + math.ldexp(format.epsilon, exponent) / 2


def _bin(magnitude: float) -> int:
    """Returns the number of the bin that a magnitude falls into."""
    within = np.float32(min(max(magnitude, 0.0), FLOAT32.max))
    return int(within.view(np.uint32) >> _SHIFT)
