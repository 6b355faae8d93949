"""The arguments of `enable` on the loss scale, checked before anything is made."""

from collections.abc import Mapping
from typing import Any

from tfamp.loss_scale.replicas.reduction import Reduction, check_reduction
from tfamp.loss_scale.rule import check_settings

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
