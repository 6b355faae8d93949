"""The arguments of `enable` and `LossScaleOptimizer` on the loss scale, checked."""

from collections.abc import Mapping
from typing import Any

from tfamp.loss_scale.gradients import Reduction
from tfamp.loss_scale.rule import ScaleRule
from tfamp.records import checks

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
_REDUCE_OPTIONS = ("reduce_dtype",)
_SMALLEST_NORMAL = 2.0**-126  # of float32; dividing by less than this gives inf


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
    options = dict(options or {})
    known = (*_SCALE_OPTIONS, *_STEP_OPTIONS, *_REDUCE_OPTIONS)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"Unknown name {unknown[0]!r} in `loss_scale_options`; expected {known}. "
            "Leave it out."
        )
    moving = {k: v for k, v in options.items() if k in _SCALE_OPTIONS}
    if (moving and loss_scale != "dynamic") or (options and loss_scale is None):
        raise ValueError(
            f"`loss_scale_options` {moving or options!r} act on a dynamic "
            f"loss scale only, but `loss_scale` is {loss_scale!r}. Leave out one of "
            "the two."
        )
    reduction = Reduction(options.get("reduce_dtype"))
    check_settings(**{k: v for k, v in options.items() if k not in _REDUCE_OPTIONS})
    has_float16 = "bfloat16" not in policy and policy != "float32"
    if not explicit or has_float16 or reduction.dtype == "float16":
        return
    if policy == "float32" and reduction.dtype == "auto":
        raise ValueError(
            "`reduce_dtype` 'auto' has no effect under policy 'float32', in which no "
            "layer computes in half precision. Pass 'bfloat16' or 'float16', or leave "
            "it out."
        )
    if _is_positive(loss_scale) or moving or (options and reduction.dtype is None):
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
    if not has_dtype:
        return None
    if dtype == "float16":
        return dict(options)
    kept = {k: v for k, v in options.items() if k not in _SCALE_OPTIONS}
    return {**kept, "initial_scale": 1.0, "dynamic": False}


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


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
        >>> rule, start = check_settings(4.0, max_scale=1024.0)
        >>> start, rule.max_scale
        (4.0, 1024.0)
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
