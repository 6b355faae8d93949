"""Learning rates: one that suits, by trying, and one for another batch size."""

import math
from typing import Any, Literal

import keras

from tfamp.records import checks
from tfamp.training.rate_search import LearningRates as LearningRates
from tfamp.training.rate_search import lr_find as lr_find


def scale_learning_rate(
    learning_rate: Any,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: Literal["linear", "sqrt"] = "linear",
    warmup_steps: int = 0,
) -> "ScaledSchedule":
    """Returns the learning rate for another batch size, as a Keras schedule.

    "linear" multiplies the rate by the ratio of the batch sizes, as suits SGD; "sqrt"
    by its square root, as suits Adam and others that divide by the gradients' size. In
    the warm-up the factor grows evenly from 1, since the first steps of a large batch
    are the ones that diverge. Both rules hold up to some size only: measure.

    Args:
        learning_rate: A number or schedule that is right for the base batch size.
        batch_size: Examples of one update now, of all replicas and micro-batches.
        base_batch_size: Examples of one update before.
        rule: "linear" or "sqrt".
        warmup_steps: Updates of the warm-up.

    Raises:
        TypeError: An argument is no number of its kind.
        ValueError: One is out of range, or the rule is unknown.

    Example:
        >>> rate = scale_learning_rate(0.1, batch_size=1024, base_batch_size=256,
        ...                            warmup_steps=4)
        >>> [round(float(rate(step)), 3) for step in (0, 2, 4, 100)]
        [0.1, 0.25, 0.4, 0.4]

    Source: P. Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear, warm-up);
    A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014
    (square root).
    """
    checks.positive_int("batch_size", batch_size)
    checks.positive_int("base_batch_size", base_batch_size)
    checks.choice("rule", rule, ("linear", "sqrt"))
    ratio = batch_size / base_batch_size
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    return ScaledSchedule(learning_rate, factor, warmup_steps)


@keras.saving.register_keras_serializable(package="tfamp")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate or schedule times a factor, which a warm-up comes to evenly."""

    def __init__(
        self, learning_rate: Any, factor: float, warmup_steps: int = 0
    ) -> None:
        super().__init__()
        if isinstance(learning_rate, dict):  # of a config
            learning_rate = keras.saving.deserialize_keras_object(learning_rate)
        schedule = keras.optimizers.schedules.LearningRateSchedule
        if not isinstance(learning_rate, schedule):
            learning_rate = checks.positive("learning_rate", learning_rate)
        self.learning_rate = learning_rate
        self.factor = checks.positive("factor", factor)
        self.warmup_steps = checks.positive_int("warmup_steps", warmup_steps, minimum=0)

    def __call__(self, step: Any) -> Any:
        """Returns the rate of an update, counted from 0; float32."""
        ops, rate = keras.ops, self.learning_rate
        rate = ops.cast(rate(step) if callable(rate) else rate, "float32")
        part = ops.minimum(ops.cast(step, "float32") / max(self.warmup_steps, 1), 1.0)
        part = part if self.warmup_steps else 1.0
        return rate * (1.0 + (self.factor - 1.0) * part)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for files."""
        rate = keras.saving.serialize_keras_object(self.learning_rate)
        names = ("factor", "warmup_steps")
        return {"learning_rate": rate} | {name: getattr(self, name) for name in names}
