"""How the loss scale moves: a pure rule, on plain numbers and on tensors.

The rule is written once over a `select`; on plain numbers that is `if`, on
tensors `tf.where`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfamp.loss_scale.gradients import Reduction, check_reduction
from tfamp.records import checks

# float16 ends at 2**16; the largest gradient of a variable is put 2**4 below,
# since gradients inside the model are often larger.
MEASURED_TARGET = 2.0**12
# What a probe multiplies the scale by where every gradient was exactly 0.
PROBE_GROWTH = 2.0**8
# Where the scale is measured, the first gradients are computed with this one.
_PROBE_SCALE = 1.0
_SMALLEST_NORMAL = 2.0**-126  # of float32; dividing by less than this gives inf


class ScaleState(NamedTuple):
    """What the rule goes by; numbers or scalar tensors.

    Attributes:
        scale: The loss scale.
        good_steps: Finite steps since the scale last changed, int.
        overflows: Non-finite steps since the scale last changed, int.
        streak: Non-finite steps in a row, int.
        good_scale: The scale of the last finite step, 0 before the first.
        peak: The scale up to which it climbs by every finite step, after a
            streak of non-finite ones; at or below `scale` otherwise.
        scale_before: The scale that the present streak began with.
        num_stops: How often a streak was so long that training was stopped, int.
        is_frozen: Whether the scale stays as it is.
    """

    scale: Any
    good_steps: Any = 0
    overflows: Any = 0
    streak: Any = 0
    good_scale: Any = 0.0
    peak: Any = 0.0
    scale_before: Any = 0.0
    num_stops: Any = 0
    is_frozen: Any = False


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
        `tf.where` for tensors.
        """
        scale, is_moving = state.scale, _negated(state.is_frozen, select)
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
            overflows=select(grows, 0, state.overflows),
            streak=0,
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
        is_moving = _negated(state.is_frozen, select)
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
            overflows=select(backs_off, 0, overflows),
            streak=streak,
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


def _negated(condition: Any, select: Callable[..., Any]) -> Any:
    return select(condition, False, True)


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


def check_settings(
    initial_scale: Any = 2.0**15,
    dynamic_growth_steps: int = 2000,
    *,
    dynamic: bool = True,
    gradient_accumulation_steps: int | None = None,
    accumulation_steps: int = 1,
    max_consecutive_skips: int | None = 64,
    **factors: Any,
) -> tuple[ScaleRule, float]:
    """Returns the rule and the scale to begin with.

    The arguments are those of `LossScaleOptimizer`, and so are the errors; `factors`
    are the further fields of a `ScaleRule`.

    Example:
        >>> rule, start = check_settings("auto", max_scale=1024.0)
        >>> start, rule.max_scale
        (1.0, 1024.0)
    """
    chosen_steps(gradient_accumulation_steps, accumulation_steps)
    rule = ScaleRule(
        growth_steps=dynamic_growth_steps, max_streak=max_consecutive_skips, **factors
    )
    return rule, _start_scale(initial_scale, dynamic, rule)


def chosen_steps(gradient_accumulation_steps: Any, accumulation_steps: Any) -> int:
    """Returns the microbatches of an update, which two arguments may name."""
    checks.positive_int("accumulation_steps", accumulation_steps)
    if gradient_accumulation_steps is None:
        return accumulation_steps
    checks.positive_int("gradient_accumulation_steps", gradient_accumulation_steps)
    if accumulation_steps not in (1, gradient_accumulation_steps):
        raise ValueError(
            f"`gradient_accumulation_steps` is {gradient_accumulation_steps!r} and "
            f"`accumulation_steps` is {accumulation_steps!r}; expected one of them, as "
            "they name the same. Leave out `accumulation_steps`."
        )
    return gradient_accumulation_steps


def _start_scale(initial_scale: Any, dynamic: bool, rule: ScaleRule) -> float:
    """Returns the number to begin with, after checking it."""
    if initial_scale == "auto" and isinstance(initial_scale, str):
        if not dynamic:
            raise ValueError(
                "`initial_scale` is 'auto' with `dynamic=False`; expected a number for "
                "a static scale. Pass one, or leave `dynamic` out and call `freeze()` "
                "later."
            )
        return min(max(_PROBE_SCALE, rule.min_scale), rule.max_scale)
    scale = checks.positive("initial_scale", initial_scale)
    if not _SMALLEST_NORMAL <= scale <= 1 / _SMALLEST_NORMAL:
        raise ValueError(
            f"`initial_scale` is {scale!r}; expected a number that float32 can divide "
            "by, in [2**-126, 2**126]. Pass a number near 1."
        )
    if dynamic and not rule.min_scale <= scale <= rule.max_scale:
        raise ValueError(
            f"`initial_scale` is {scale!r}; expected a number in [`min_scale`, "
            f"`max_scale`], which is [{rule.min_scale!r}, {rule.max_scale!r}]. Pass "
            "wider bounds, or `dynamic=False`."
        )
    return scale


# Arguments of `LossScaleOptimizer` that say how a dynamic scale moves, and the rest.
_SCALE_OPTIONS = (
    "initial_scale",
    "dynamic_growth_steps",
    "growth_factor",
    "backoff_factor",
    "hysteresis",
    "min_scale",
    "max_scale",
)
_STEP_OPTIONS = (
    "gradient_accumulation_steps",
    "accumulation_steps",
    "max_consecutive_skips",
)
_REDUCE_OPTIONS = ("reduce_dtype", "bytes_per_pack")


def check_loss_scale(
    policy: str,
    loss_scale: str | float | None,
    options: Mapping[str, Any] | None,
    explicit: bool,
) -> None:
    """Raises where the arguments of `enable` on the loss scale clash or do nothing."""
    if isinstance(loss_scale, bool) or not (
        loss_scale is None or loss_scale == "dynamic" or _is_positive(loss_scale)
    ):
        raise ValueError(
            f"Unknown `loss_scale` {loss_scale!r}; expected 'dynamic', a positive "
            "finite number for a static scale, or None. Leave it out for 'dynamic'."
        )
    known = (*_SCALE_OPTIONS, *_STEP_OPTIONS, *_REDUCE_OPTIONS)
    unknown = [name for name in options or {} if name not in known]
    if unknown:
        raise ValueError(
            f"Unknown name {unknown[0]!r} in `loss_scale_options`; expected {known}. "
            "Leave it out."
        )
    moving = {k: v for k, v in (options or {}).items() if k in _SCALE_OPTIONS}
    if (moving and loss_scale != "dynamic") or (options and loss_scale is None):
        raise ValueError(
            f"`loss_scale_options` {moving or dict(options or {})!r} act on a dynamic "
            f"loss scale only, but `loss_scale` is {loss_scale!r}. Leave out one of "
            "the two."
        )
    reduced = {k: v for k, v in (options or {}).items() if k in _REDUCE_OPTIONS}
    reduction = Reduction(reduced.get("reduce_dtype"), reduced.get("bytes_per_pack", 0))
    check_reduction(reduction.dtype, reduction.bytes_per_pack)
    check_settings(**{k: v for k, v in (options or {}).items() if k not in reduced})
    has_float16 = "bfloat16" not in policy and policy != "float32"
    if not explicit or has_float16 or reduction.dtype == "float16":
        return
    if policy == "float32" and reduction.dtype == "auto":
        raise ValueError(
            "`reduce_dtype` 'auto' has no effect under policy 'float32', in which no "
            "layer computes in half precision. Pass 'bfloat16' or 'float16', or leave "
            "it out."
        )
    if _is_positive(loss_scale) or moving or (options and reduction.is_default):
        raise ValueError(
            f"`loss_scale` {loss_scale!r} has no effect under policy {policy!r}, in "
            "which nothing computes in float16. Leave it out, or use 'mixed_float16'."
        )


def without_float16(options: Mapping[str, Any], computes_in_half: bool) -> Any:
    """Returns the arguments for a model without float16, None where it needs none.

    Its optimizer is wrapped for the reduction alone, with a loss scale only where
    float16 is sent.
    """
    dtype = options.get("reduce_dtype")
    has_dtype = dtype is not None and (dtype != "auto" or computes_in_half)
    if not has_dtype and not options.get("bytes_per_pack"):
        return None
    if dtype == "float16":
        return dict(options)
    kept = {k: v for k, v in options.items() if k not in _SCALE_OPTIONS}
    return {**kept, "initial_scale": 1.0, "dynamic": False}


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
