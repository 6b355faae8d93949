"""The arguments of `enable` and `LossScaleOptimizer` on the loss scale, checked."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers as hooks
from tfamp.loss_scale.gradients import check_reduce_dtype
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
    dtype = options.get("reduce_dtype")
    check_reduce_dtype(dtype)
    check_settings(**{k: v for k, v in options.items() if k not in _REDUCE_OPTIONS})
    has_float16 = "bfloat16" not in policy and policy != "float32"
    if not explicit or has_float16 or dtype == "float16":
        return
    if policy == "float32" and dtype == "auto":
        raise ValueError(
            "`reduce_dtype` 'auto' has no effect under policy 'float32', in which no "
            "layer computes in half precision. Pass 'bfloat16' or 'float16', or leave "
            "it out."
        )
    if _is_positive(loss_scale) or moving or (options and dtype is None):
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


def adopted_accumulation(inner: Any, steps: int) -> int:
    """Takes `gradient_accumulation_steps` over from an inner optimizer.

    Returns the microbatches of an update; a ValueError says that both are to
    accumulate.
    """
    found = getattr(inner, "gradient_accumulation_steps", None)
    if found is None:
        return steps
    if steps != 1:
        raise ValueError(
            f"`accumulation_steps` is {steps!r} and the inner optimizer has "
            f"`gradient_accumulation_steps={found!r}`; expected one of them. Leave out "
            "the inner optimizer's."
        )
    if inner.built:
        # Keras counted microbatches; here an update counts.
        counter = hooks.call_counter(inner)
        counter.assign(counter // found)
    inner.gradient_accumulation_steps = None
    logging.info(
        "`gradient_accumulation_steps=%r` of the wrapped optimizer becomes "
        "`gradient_accumulation_steps=%r` of the LossScaleOptimizer, which counts "
        "only finite microbatches.",
        found,
        found,
    )
    return int(found)


def check_inner(inner: Any) -> None:
    """Raises where `inner` cannot be wrapped."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            f"`inner_optimizer` is {inner!r}, of type {type(inner).__name__}; expected "
            "a Keras optimizer. Pass `keras.optimizers.Adam()`, or `keras.optimizers."
            "get(name)`."
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`inner_optimizer` is {inner!r}, which scales the loss already; expected "
            "a plain optimizer. Pass its `inner_optimizer`."
        )


def check_inner_settings(optimizer: Any) -> None:
    """Raises where a setting that was changed since would spoil the update."""
    for name in optimizer.refused_settings:
        value = getattr(optimizer.inner_optimizer, name, None)
        if value is not None:
            raise ValueError(
                f"`{name}` of the wrapped optimizer is {value!r}; expected None, "
                "since the wrapper does it. Set it to None."
            )
    strategy = tf.distribute.get_strategy()
    is_present = hooks.strategy_of(optimizer) is strategy
    if strategy.num_replicas_in_sync > 1 and not is_present:
        raise ValueError(
            f"The optimizer was made outside the {type(strategy).__name__} that "
            "trains with it; its counters would differ between replicas. Make and "
            "compile it inside `with strategy.scope():`."
        )


def variables_for(optimizer: Any, gradients: list[Any], given: Any) -> list[Any]:
    """Returns the variables that gradients are applied to; builds the optimizer."""
    if given is None and not optimizer.built:
        raise ValueError(
            "`trainable_variables` is None and the optimizer is not built; "
            "expected variables. Pass them, or call "
            "`optimizer.build(variables)` first."
        )
    variables = list(hooks.trained_by(optimizer) if given is None else given)
    if len(variables) != len(gradients):
        raise ValueError(
            f"`grads` has {len(gradients)} entries for {len(variables)} variables; "
            "expected one for each. Pass None where a variable has no gradient."
        )
    if all(gradient is None for gradient in gradients):
        raise ValueError("No gradients provided for any variable.")
    optimizer.build(variables)
    hooks.check_known(optimizer, variables)
    return variables
