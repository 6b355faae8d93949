"""The arguments of a `LossScaleOptimizer`, checked before anything is made of them."""

from typing import Any

from tfamp.loss_scale.rule import ScaleRule
from tfamp.records import checks

# Where the scale is measured, the first gradients are computed with this one.
_PROBE_SCALE = 1.0
_SMALLEST_NORMAL = 2.0**-126  # of float32; dividing by less than this gives inf


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

    Args:
        initial_scale: As for `LossScaleOptimizer`, and so are the others.
        dynamic_growth_steps: As there.
        dynamic: As there.
        gradient_accumulation_steps: As there.
        accumulation_steps: As there.
        max_consecutive_skips: As there.
        **factors: The further fields of a `ScaleRule`.

    Raises:
        ValueError: An argument is out of range.
        TypeError: An argument has the wrong type.

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
    """Returns the microbatches of an update, which two arguments may name.

    Raises:
        ValueError: They differ, or are below 1.
        TypeError: One is no whole number.
    """
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
