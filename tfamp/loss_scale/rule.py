"""How the loss scale moves: a pure rule on scalars, and the settings it goes by."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.records import checks

DEFAULT_SCALE = 2.0**15  # to begin with
FROZEN, STATIC = 1, 2  # of `is_frozen`: by `freeze`, or by the constructor
_SMALLEST_NORMAL = 2.0**-126  # of float32; dividing by less than this gives inf
# Arguments that say nothing of how a dynamic scale moves.
_OF_STEPS = (
    *("accumulation_steps", "gradient_accumulation_steps"),
    *("max_consecutive_skips", "reduce_dtype"),
)


class ScaleState(NamedTuple):
    """All that a step reads and writes: scalar tensors, or numbers outside of it."""

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


EMPTY_WINDOW: dict[str, Any] = {"microbatches": 0, "weight": 0.0}


def _select(condition: Any, yes: Any, no: Any) -> tf.Tensor:
    """Returns `tf.where`, with a plain number taking the dtype of the other value."""
    dtypes = [x.dtype for x in (yes, no) if tf.is_tensor(x)]
    if dtypes:
        yes, no = (tf.convert_to_tensor(x, dtypes[0]) for x in (yes, no))
    return tf.where(condition, yes, no)


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """Where the scale begins, when it grows and when it backs off.

    The fields are arguments of `LossScaleOptimizer`; one that is out of its range
    raises ValueError, one that is no number TypeError.

    Example:
        >>> float(ScaleRule(8.0).after_non_finite(ScaleState(8.0)).scale)
        4.0
    """

    initial_scale: float = DEFAULT_SCALE
    dynamic_growth_steps: int = 2000
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    accumulation_steps: int = 1
    max_consecutive_skips: int | None = 64
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("dynamic_growth_steps", "hysteresis", "accumulation_steps"):
            checks.positive_int(name, getattr(self, name))
        if self.max_consecutive_skips is not None:
            checks.positive_int("max_consecutive_skips", self.max_consecutive_skips)
        checks.fraction("backoff_factor", self.backoff_factor, closed=False)
        for name in ("initial_scale", "min_scale", "max_scale", "growth_factor"):
            checks.positive(name, getattr(self, name))
        if self.growth_factor <= 1:
            raise ValueError(
                f"`growth_factor` is {self.growth_factor!r}; expected a number above "
                "1, since the scale could never rise again. Leave it out for 2."
            )
        lowest, highest = _SMALLEST_NORMAL, 1 / _SMALLEST_NORMAL
        if self.dynamic:
            lowest, highest = self.min_scale, self.max_scale
        if not lowest <= self.initial_scale <= highest:
            raise ValueError(
                f"`initial_scale` is {self.initial_scale!r}; expected a number in "
                f"[{lowest!r}, {highest!r}], from `min_scale` to `max_scale` where it "
                "moves, else what float32 can divide by. Pass one in between."
            )
        if self.reduce_dtype is not None:
            checks.choice("reduce_dtype", self.reduce_dtype, ("float16", "bfloat16"))

    def after_finite(self, state: ScaleState) -> ScaleState:
        """Returns the state after a step whose gradients were finite."""
        scale, limit = state.scale, self.max_scale
        is_due = state.good_steps + 1 >= self.dynamic_growth_steps
        grows = (state.is_frozen <= 0) & is_due
        grown = scale * self.growth_factor
        # A scale above the ceiling, put there by hand, stays.
        grown = _select(grown > limit, _select(scale < limit, limit, scale), grown)
        return state._replace(
            scale=_select(grows, grown, scale),
            good_steps=_select(grows, 0, state.good_steps + 1),
            judged=state.judged + 1,
            streak=0,
            overflows=_select(grows, 0, state.overflows),
        )

    def after_non_finite(self, state: ScaleState) -> ScaleState:
        """Returns the state after a step that was skipped."""
        most = self.max_consecutive_skips
        is_new = state.streak == 0
        if most is not None:
            is_new = is_new | (state.streak >= most)
        streak = _select(is_new, 1, state.streak + 1)
        before = _select(is_new, state.scale, state.scale_before)
        overflows = state.overflows + 1
        is_moving = state.is_frozen <= 0
        backs_off = is_moving & (overflows >= self.hysteresis)
        # A scale below the floor, put there by hand, stays.
        floor = _select(state.scale < self.min_scale, state.scale, self.min_scale)
        lowered = state.scale * self.backoff_factor
        lowered = _select(lowered < floor, floor, lowered)
        stops = streak >= most if most is not None else tf.constant(False)
        scale = _select(backs_off, lowered, state.scale)
        return state._replace(
            scale=_select(stops & is_moving, before, scale),
            good_steps=0,
            judged=state.judged + 1,
            skipped=state.skipped + 1,
            streak=streak,
            overflows=_select(stops | backs_off, 0, overflows),
            num_stops=_select(stops, state.num_stops + 1, state.num_stops),
            scale_before=before,
        )


def check_loss_scale(
    policy: str,
    loss_scale: str | float | None,
    options: Mapping[str, Any] | None,
    explicit: bool,
) -> None:
    """Raises where the arguments of `enable` on the loss scale clash or do nothing."""
    is_number = isinstance(loss_scale, int | float) and loss_scale is not True
    if loss_scale not in (None, "dynamic") and not (
        is_number and 0 < float(loss_scale) < float("inf")
    ):
        raise ValueError(
            f"Unknown `loss_scale` {loss_scale!r}; expected 'dynamic', a positive "
            "finite number for a static scale, or None. Leave it out for 'dynamic'."
        )
    options = {**options} if options else {}
    known = {field.name for field in dataclasses.fields(ScaleRule)} - {"dynamic"}
    for name in options:
        checks.choice("loss_scale_options", name, sorted({*known, *_OF_STEPS}))
    moving = {k: v for k, v in options.items() if k not in _OF_STEPS}
    if (moving and loss_scale != "dynamic") or (options and loss_scale is None):
        raise ValueError(
            f"`loss_scale_options` {moving or options!r} act on a dynamic "
            f"loss scale only, but `loss_scale` is {loss_scale!r}. Leave out one of "
            "the two."
        )
    steps = chosen_steps(*(options.get(name) for name in _OF_STEPS[:2]))
    fields = {k: v for k, v in options.items() if k in known}
    ScaleRule(**{**fields, "accumulation_steps": steps})
    has_float16 = "bfloat16" not in policy and policy != "float32"
    dtype = options.get("reduce_dtype")
    has_effect = has_float16 or dtype == "float16" or not explicit
    if not has_effect and (is_number or moving or (options and dtype is None)):
        raise ValueError(
            f"`loss_scale` {loss_scale!r} has no effect under policy {policy!r}, in "
            "which nothing computes in float16. Leave it out, or use 'mixed_float16'."
        )


def without_float16(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments for a model without float16, None where it needs none.

    Its optimizer is wrapped for the reduction alone, with a loss scale only where
    float16 is sent.
    """
    kept = {k: v for k, v in options.items() if k in _OF_STEPS}
    dtype = options.get("reduce_dtype")
    if dtype == "float16":
        return {**options}
    return {**kept, "initial_scale": 1.0, "dynamic": False} if dtype else None


def chosen_steps(*given: int | None) -> int:
    """Returns the microbatches of an update, which may be named in several places."""
    name = "gradient_accumulation_steps"
    known = {checks.positive_int(name, each) for each in given if each is not None}
    if len(known - {1}) > 1:
        raise ValueError(
            f"`{name}` and `accumulation_steps` are {sorted(known - {1})!r}; expected "
            "one number, as they name the same. Leave out one of them."
        )
    return max(known, default=1)
