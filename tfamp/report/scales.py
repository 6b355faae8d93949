"""From values to places on an axis, with round numbers to write beside it."""

import dataclasses
import math
from collections.abc import Iterable

# Steps between ticks, in units of a power of ten.
_STEPS = (1, 2, 5, 10)
_MAX_TICKS = 5
# From this ratio on small values are not seen beside large ones.
_LOG_FROM = 30


@dataclasses.dataclass(frozen=True)
class Scale:
    """An axis.

    Args:
        low: Value at its start.
        high: Value at its end.
        start: Coordinate of its start.
        end: Coordinate of its end.
        is_log: Whether equal ratios are equally far.
        whole: Whether it counts, so that there is nothing between 1 and 2.

    Example:
        >>> Scale(0.0, 10.0, 100.0, 200.0)(5.0)
        150.0
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """Returns the coordinate of a value, held to the axis; NaN for no number."""
        if math.isnan(value) or (self.is_log and value <= 0):
            return math.nan
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Returns round values on the axis and how they are written."""
        if self.is_log:
            values = _log_ticks(self.low, self.high)
            if len(values) > 1:
                return tuple((value, _label(value)) for value in values)
        step = _step(self.high - self.low)
        step = max(step, 1.0) if self.whole else step
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        if decimals > 4 or abs(self.high) >= 1e6:
            return tuple((value, _label(value)) for value in values)
        return tuple((v, f"{v + 0.0:,.{decimals}f}".replace("-", "−")) for v in values)


def scale(
    values: Iterable[float],
    start: float,
    end: float,
    *,
    from_zero: bool = False,
    may_be_log: bool = False,
    whole: bool = False,
) -> Scale:
    """Returns an axis that holds all finite values, with some room.

    Args:
        values: To be shown; none at all gives 0 to 1.
        start: Coordinate of the least.
        end: Coordinate of the largest.
        from_zero: Whether the axis starts at 0, as bars need.
        may_be_log: Whether it is logarithmic where values lie far apart.
        whole: Whether it counts; then it ends at the outermost values.
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if may_be_log and low > 0 and high / low >= _LOG_FROM:
        room = (high / low) ** 0.03
        return Scale(low / room, high * room, start, end, is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        room = 1.0 if whole else abs(low) * 0.1 or 1.0
        if not from_zero or low == 0:
            low -= 0.0 if from_zero else room
        high += room
    elif not whole:
        room = 0.04 * (high - low)
        low, high = low - (0.0 if from_zero and low == 0 else room), high + room
    return Scale(low, high, start, end, whole=whole)


def _step(width: float) -> float:
    """Returns the least round step that gives at most `_MAX_TICKS` ticks."""
    rough = width / _MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in _STEPS if power * step >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten, with 2 and 5 times them where those are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [s * 10.0**p for p in powers for s in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            break
    stride = math.ceil(len(found) / (_MAX_TICKS + 1)) or 1
    return found[::stride]


def _label(value: float) -> str:
    """Returns a number as short as it is exact enough for an axis."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:,.6g}".replace("-", "−")
