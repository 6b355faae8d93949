"""How the loss scale moves: a pure rule, on plain numbers and on tensors.

The rule is written once over a `select`; on plain numbers that is `if`, on
tensors `tf.where`. The scale that is measured is written in both forms.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.records import checks

# float16 ends at 2**16; the largest gradient of a variable is put 2**4 below,
# since gradients inside the model are often larger.
MEASURED_TARGET = 2.0**12
# What a probe multiplies the scale by where every gradient was exactly 0.
PROBE_GROWTH = 2.0**8
_FRACTION_BITS = 23  # of a float32


class ScaleState(NamedTuple):
    """All that a step reads and writes; numbers or scalar tensors."""

    scale: Any
    good_steps: Any = 0  # finite steps since the scale last changed
    # Whole numbers. A step is a microbatch where updates take several.
    judged: Any = 0  # steps, finite or not
    applied: Any = 0  # updates
    skipped: Any = 0  # steps with non-finite gradients
    streak: Any = 0  # of those, in a row
    overflows: Any = 0  # of those, since the scale last changed
    num_stops: Any = 0  # how often a streak was so long that training was stopped
    is_frozen: Any = 0  # above 0 where the scale stays as it is
    is_probing: Any = 0  # 1 where the scale is yet to be measured
    microbatches: Any = 0  # in the present window of accumulation
    dropped: Any = 0  # windows in a row whose sum was not finite
    # Real numbers.
    good_scale: Any = 0.0  # the scale of the last finite step, 0 before the first
    peak: Any = 0.0  # climbed up to by every finite step, after a streak of others
    scale_before: Any = 0.0  # the scale that the present streak began with
    norm: Any = 0.0  # of the last step's unscaled gradients
    finite_norm: Any = 0.0  # the last one that was finite
    weight: Any = 0.0  # of the microbatches in the present window


# The fields of a new window of accumulation.
EMPTY_WINDOW: dict[str, Any] = {"microbatches": 0, "weight": 0.0}


def select(condition: Any, yes: Any, no: Any) -> tf.Tensor:
    """Returns `tf.where`, with a plain number taking the dtype of the other value."""
    dtypes = [x.dtype for x in (yes, no) if tf.is_tensor(x)]
    if dtypes:
        yes, no = (tf.convert_to_tensor(x, dtypes[0]) for x in (yes, no))
    return tf.where(condition, yes, no)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """When the scale grows and when it backs off.

    Attributes:
        growth_steps: Finite steps after which the scale grows, at least 1.
        growth_factor: What it is multiplied by then, above 1.
        backoff_factor: What it is multiplied by after `hysteresis` non-finite
            steps, above 0 and below 1.
        hysteresis: Non-finite steps, not necessarily in a row, that make the
            scale back off; counted anew whenever it changes.
        min_scale: The scale never falls below, above 0.
        max_scale: The scale never rises above, finite.
        max_streak: Non-finite steps in a row after which training stops, or
            None for never.

    Raises:
        ValueError: A field is out of its range.
        TypeError: A field is no number.

    Example:
        >>> rule = ScaleRule(growth_steps=2)
        >>> state = rule.after(ScaleState(scale=8.0), is_finite=False)
        >>> state.scale
        4.0
        >>> rule.after(rule.after(state, is_finite=True), is_finite=True).scale
        8.0

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2;
    hysteresis as in Megatron-LM's `DynamicGradScaler`, which keeps backing off at
    every further overflow until the scale has grown once.
    """

    growth_steps: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    max_streak: int | None = None

    def __post_init__(self) -> None:
        checks.positive_int("dynamic_growth_steps", self.growth_steps)
        checks.positive_int("hysteresis", self.hysteresis)
        if self.max_streak is not None:
            checks.positive_int("max_consecutive_skips", self.max_streak)
        checks.fraction("backoff_factor", self.backoff_factor, closed=False)
        checks.positive("min_scale", self.min_scale)
        checks.positive("max_scale", self.max_scale)
        if checks.positive("growth_factor", self.growth_factor) <= 1:
            raise ValueError(
                f"`growth_factor` is {self.growth_factor!r}; expected a number above "
                "1, since the scale could never rise again. Leave it out for 2."
            )
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"`min_scale` {self.min_scale!r} is above `max_scale` "
                f"{self.max_scale!r}; expected a range. Exchange the two."
            )

    def after(self, state: ScaleState, *, is_finite: bool) -> ScaleState:
        """Returns the state after one step whose gradients were finite or not."""
        follow = self.after_finite if is_finite else self.after_non_finite
        return follow(state)

    def after_finite(
        self, state: ScaleState, select: Callable[..., Any] = _choose
    ) -> ScaleState:
        """Returns the state after a step that was applied.

        `select` takes a condition and two values and returns the first where it holds;
        the function of that name for tensors.
        """
        scale, is_moving = state.scale, state.is_frozen <= 0
        is_climbing = is_moving & (scale < state.peak)
        is_due = is_moving & (state.good_steps + 1 >= self.growth_steps)
        grows = is_climbing | is_due
        limit = select(is_climbing, state.peak, self.max_scale)
        grown = scale * self.growth_factor
        # A scale above the ceiling, put there by hand, stays.
        grown = select(grown > limit, select(limit > scale, limit, scale), grown)
        return state._replace(
            scale=select(grows, grown, scale),
            good_steps=select(grows, 0, state.good_steps + 1),
            judged=state.judged + 1,
            streak=0,
            overflows=select(grows, 0, state.overflows),
            good_scale=scale,
        )

    def after_non_finite(
        self, state: ScaleState, select: Callable[..., Any] = _choose
    ) -> ScaleState:
        """Returns the state after a step that was skipped; as `after_finite`."""
        is_new = state.streak == 0
        if self.max_streak is not None:
            is_new = is_new | (state.streak >= self.max_streak)
        streak = select(is_new, 1, state.streak + 1)
        before = select(is_new, state.scale, state.scale_before)
        overflows = state.overflows + 1
        is_moving = state.is_frozen <= 0
        backs_off = is_moving & (overflows >= self.hysteresis)
        lowered = state.scale * self.backoff_factor
        floor = select(state.scale < self.min_scale, state.scale, self.min_scale)
        lowered = select(lowered < floor, floor, lowered)
        scale = select(backs_off, lowered, state.scale)
        # One overflow says that the scale was too high. Two in a row say that
        # something else was, so what worked before is worth climbing back to.
        peak = select(streak == 2, state.good_scale, state.peak)
        peak = select(is_new, scale, peak)
        after = state._replace(
            scale=scale,
            good_steps=0,
            judged=state.judged + 1,
            skipped=state.skipped + 1,
            streak=streak,
            overflows=select(backs_off, 0, overflows),
            peak=peak,
            scale_before=before,
        )
        if self.max_streak is None:
            return after
        stops = streak >= self.max_streak
        return after._replace(
            scale=select(stops & is_moving, before, scale),
            overflows=select(stops, 0, after.overflows),
            peak=select(stops, before, peak),
            num_stops=select(stops, state.num_stops + 1, state.num_stops),
        )


def measured_scale(largest: float, scale: float) -> float:
    """Returns the scale that suits gradients whose largest element was measured.

    That is the power of two that takes `largest`, an unscaled magnitude, to at most
    `MEASURED_TARGET`, or a higher scale to probe with where it is 0.

    Example:
        >>> measured_scale(0.25, 1.0)
        16384.0
        >>> measured_scale(0.0, 1.0)
        256.0
    """
    if largest == 0:
        return scale * PROBE_GROWTH
    return 2.0 ** math.floor(math.log2(MEASURED_TARGET / largest))


def with_measured_scale(
    rule: ScaleRule, before: ScaleState, after: ScaleState, largest: tf.Tensor
) -> ScaleState:
    """Sets the scale after the first finite gradients, once; as `measured_scale`.

    `largest` is their largest element, an unscaled magnitude.
    """

    def measure() -> tuple[tf.Tensor, tf.Tensor]:
        power = _power_of_two_below(MEASURED_TARGET / largest)
        is_zero = tf.equal(largest, 0)
        wanted = tf.where(is_zero, before.scale * PROBE_GROWTH, power)
        bounded = tf.clip_by_value(wanted, rule.min_scale, rule.max_scale)
        return bounded, tf.cast(is_zero, tf.int64)

    scale, is_probing = tf.cond(
        before.is_probing > 0, measure, lambda: (after.scale, before.is_probing)
    )
    return after._replace(scale=scale, is_probing=is_probing)


def _power_of_two_below(x: tf.Tensor) -> tf.Tensor:
    """Clears the fraction of a positive float32: exact, unlike a logarithm."""
    limited = tf.minimum(x, 2.0**100)
    bits = tf.bitcast(limited, tf.int32)
    exponent = tf.bitwise.right_shift(bits, _FRACTION_BITS)
    return tf.bitcast(tf.bitwise.left_shift(exponent, _FRACTION_BITS), tf.float32)
