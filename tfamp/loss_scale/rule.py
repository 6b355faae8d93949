"""How the loss scale moves: a pure rule, on plain numbers and on tensors.

The rule is written once over a `select`; on plain numbers that is `if`, on
tensors `tf.where`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.records import checks

DEFAULT_SCALE = 2.0**15  # to begin with


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
    microbatches: Any = 0  # in the present window of accumulation
    dropped: Any = 0  # windows in a row whose sum was not finite
    # Real numbers.
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
        scale, limit = state.scale, self.max_scale
        is_due = state.good_steps + 1 >= self.growth_steps
        grows = (state.is_frozen <= 0) & is_due
        grown = scale * self.growth_factor
        # A scale above the ceiling, put there by hand, stays.
        grown = select(grown > limit, select(scale < limit, limit, scale), grown)
        return state._replace(
            scale=select(grows, grown, scale),
            good_steps=select(grows, 0, state.good_steps + 1),
            judged=state.judged + 1,
            streak=0,
            overflows=select(grows, 0, state.overflows),
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
        after = state._replace(
            scale=scale,
            good_steps=0,
            judged=state.judged + 1,
            skipped=state.skipped + 1,
            streak=streak,
            overflows=select(backs_off, 0, overflows),
            scale_before=before,
        )
        if self.max_streak is None:
            return after
        stops = streak >= self.max_streak
        return after._replace(
            scale=select(stops & is_moving, before, scale),
            overflows=select(stops, 0, after.overflows),
            num_stops=select(stops, state.num_stops + 1, state.num_stops),
        )
