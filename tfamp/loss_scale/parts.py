"""What the parts of a `LossScaleOptimizer` share, and pass on to the one inside."""

from typing import Any

from absl import logging

from tfamp.keras_hooks import optimizers
from tfamp.loss_scale.counters import NonfiniteCounts, ScaleVariables
from tfamp.loss_scale.replicas.reduction import Reduction
from tfamp.loss_scale.rule import ScaleRule

_INNER = "inner_optimizer"
# Attributes that every Keras optimizer has, the wrapper too, and that only mean
# something on the one inside.
_SHARED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
)


class Parts:
    """Attributes that the constructor sets; each part is a class of its own file."""

    name: str
    built: bool
    inner_optimizer: Any
    rule: ScaleRule
    scale_variables: ScaleVariables
    nonfinite: NonfiniteCounts | None
    saved_beside: Any
    step_counter: Any
    dynamic_scale: Any
    initial_scale: Any
    dynamic: bool
    dynamic_growth_steps: int
    accumulation_steps: int
    max_consecutive_skips: int | None
    reduction: Reduction
    measures_scale: bool
    leaves_stop_to_caller: bool
    has_gradient: Any
    has_scaled_loss: bool
    _variables: list[Any]
    _accumulators: list[Any]
    _loaded: list[Any] | None
    _loaded_beside: dict[str, Any]
    _scales_at_load: Any
    _num_stops_seen: int
    _distribution_strategy: Any

    accumulates: Any
    is_overwritten: Any
    reduce_dtype: Any
    bytes_per_pack: Any
    iterations: Any
    apply_gradients: Any
    _on_all_replicas: Any
    _put: Any
    _trainable_variables: list[Any]
    _var_key: Any


def _shared(name: str) -> property:
    def get(self: Any) -> Any:
        inner = vars(self).get(_INNER)
        return None if inner is None else getattr(inner, name)

    def put(self: Any, value: Any) -> None:
        inner = vars(self).get(_INNER)
        if inner is not None:  # Keras sets its defaults before there is one
            setattr(inner, name, value)

    return property(get, put, doc=f"`{name}` of the inner optimizer.")


def _refused(name: str, instead: str) -> property:
    def put(self: Any, value: Any) -> None:
        if value is not None and _INNER in vars(self):
            raise ValueError(
                f"`{name}` is {value!r}, but a LossScaleOptimizer has none of its own; "
                f"expected None. {instead}"
            )

    return property(lambda self: None, put, doc=f"None: {instead}")


class Delegating(Parts):
    """Passes on to `inner_optimizer` what the wrapper does not have itself."""

    loss_scale_factor = _refused(
        "loss_scale_factor",
        "Pass `initial_scale` and `dynamic=False` to the constructor, or call "
        "`freeze(value)`.",
    )
    gradient_accumulation_steps = _refused(
        "gradient_accumulation_steps",
        "Pass it to the constructor.",
    )

    def __getattr__(self, name: str) -> Any:
        """Reads a public attribute that only the inner optimizer has."""
        inner = vars(self).get(_INNER)
        if inner is None or name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets on the inner optimizer what only that one has, as its momentum."""
        inner = vars(self).get(_INNER)
        is_inner_only = (
            inner is not None
            and not name.startswith("_")
            and name not in vars(self)
            and name not in Parts.__annotations__
            and not hasattr(type(self), name)
            and hasattr(inner, name)
        )
        if is_inner_only:
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(
        self, var_list: Any = None, var_names: Any = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay.

        Args:
            var_list: Variables to exclude.
            var_names: Patterns searched for in variables' names.

        Raises:
            ValueError: The inner optimizer is built already, and has traced its
                update with what was set before.
        """
        if self.inner_optimizer.built:
            raise ValueError(
                "`exclude_from_weight_decay` came after the optimizer was built; "
                "expected it before the first step. Call it on a new optimizer."
            )
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Ends training in the inner optimizer: with EMA, takes the averages over."""
        self.inner_optimizer.finalize_variable_values(var_list)


for _name in _SHARED:
    setattr(Delegating, _name, _shared(_name))


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
        counter = optimizers.call_counter(inner)
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
