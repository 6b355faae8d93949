"""What the parts of a `LossScaleOptimizer` know of one another."""

from typing import Any

from tfamp.loss_scale.fit.blame import Blame
from tfamp.loss_scale.rule import ScaleRule
from tfamp.loss_scale.tally import Tally


class Parts:
    """Attributes that the constructor sets; each part is a class of its own file.

    Attributes:
        inner_optimizer: The optimizer that makes the updates.
        rule: When the scale moves.
        tally: The scale and the counters.
        blame: Whose gradients were not finite; None until `build`.
        initial_scale: As given to the constructor.
        dynamic: As given to the constructor.
        dynamic_growth_steps: As given to the constructor.
        accumulation_steps: Microbatches in an update.
        max_consecutive_skips: Skips in a row that stop training, or None.
        measures_scale: Whether the first gradients set the scale.
        leaves_stop_to_caller: Whether `fit`, which has something to undo first,
            raises the error.
        has_gradient: For each variable whether the present window has a gradient
            of it; None where nothing is accumulated.
        has_scaled_loss: Whether gradients ever came of which the scale was known.
    """

    name: str
    built: bool
    inner_optimizer: Any
    rule: ScaleRule
    tally: Tally
    blame: Blame | None
    saved_beside: Any
    step_counter: Any
    dynamic_scale: Any
    initial_scale: Any
    dynamic: bool
    dynamic_growth_steps: int
    accumulation_steps: int
    max_consecutive_skips: int | None
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
    iterations: Any
    apply_gradients: Any
    _on_all_replicas: Any
    _put: Any
    _trainable_variables: list[Any]
    _var_key: Any
