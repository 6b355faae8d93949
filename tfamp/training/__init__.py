"""Learning rates: one that suits, by trying, and one for another batch size."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import around_training, trainer
from tfamp.keras_hooks.patches import replaced
from tfamp.machine import cpus
from tfamp.records import checks, lazy_attributes
from tfamp.records.console import progress
from tfamp.records.record import Record
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged

__all__ = ["LearningRates", "ScaledSchedule", "lr_find", "scale_learning_rate"]

_MEMORY = 0.9  # of the average over steps, as is usual for this test
_DIVERGED = 4.0  # so many times as high as the lowest smoothed loss
_FIRST_STEPS = 5  # that no suggestion rests on: their average is of few
# Part of the first loss that a fall must come to, and part of the fall from which on
# it has begun.
_NOTICEABLE, _BEGUN = 0.02, 0.1


@dataclasses.dataclass(frozen=True)
class LearningRates(Record):
    """The losses of steps at growing learning rates."""

    model: str
    rates: tuple[float, ...]  # of each step
    losses: tuple[float, ...]  # of each step's batch, before its update
    smoothed: tuple[float, ...]  # the same, averaged over the steps before
    suggestion: float | None  # where that falls fastest, at most `highest`
    highest: float | None  # a tenth of the rate where it was lowest
    why_it_ended: str
    why: str  # what the suggestion rests on, in one sentence

    def __str__(self) -> str:
        suggestion = "none" if self.suggestion is None else f"{self.suggestion:.3g}"
        return (
            f"Learning rate for {self.model!r}: {suggestion}.\n{self.why}\n"
            f"{len(self.rates)} steps were run, then {self.why_it_ended}."
        )


def lr_find(
    model: keras.Model,
    data: Any,
    *,
    min_rate: float = 1e-7,
    max_rate: float = 10.0,
    num_steps: int = 100,
    batch_size: int = 32,
) -> LearningRates:
    """Trains some steps at rates that grow from step to step, and says which suits.

    The rate grows by the same factor each step until the loss diverges. Where the loss
    falls fastest lies a rate that trains well from the start; a tenth of the one at the
    lowest loss is about the highest that a schedule should reach, and the most that is
    suggested. It holds for this model, policy and batch size. The model stays as it is.

    Args:
        model: A compiled model.
        data: What `fit` takes. It is read again from the start where it ends.
        min_rate: The first rate.
        max_rate: The last one, after `num_steps` steps.
        num_steps: Steps from one to the other.
        batch_size: Examples in a batch of arrays.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not of these.
        ValueError: Rates are out of order, or data or the first loss are bad.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        >>> data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> 1e-3 < lr_find(model, data).suggestion < 3
        True

    Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2017,
    section 3.3; the choice of the steepest point is fastai's.
    """
    low = checks.positive("min_rate", min_rate)
    high = checks.positive("max_rate", max_rate)
    checks.positive_int("num_steps", num_steps, minimum=2 * _FIRST_STEPS)
    if low >= high:
        raise ValueError(
            f"`min_rate` is {low:g} and `max_rate` is {high:g}; expected the first to "
            "be the lower one. Exchange them."
        )
    check_model(model)
    cpus.avoid_broken_amx()
    with seeds_put_back():
        dataset = dataset_of(data, batch_size)
        build(model, first_batch(dataset))
        rates = np.geomspace(low, high, num_steps).tolist()
        with unchanged(model):
            losses, why_it_ended = _losses(model, dataset.repeat(), rates)
    if not losses:
        raise ValueError(
            f"The first loss of {model.name!r} is not finite; expected a healthy "
            "model. Ask `tfamp.triage(model, batch)` for the cause."
        )
    rates, smoothed = rates[: len(losses)], _smoothed(losses)
    lowest = int(np.argmin(smoothed))
    suggestion = highest = None
    why = (
        f"The loss fell at no rate up to {rates[-1]:.3g}: is the model able to learn "
        "from this data? Try more steps, or `tfamp.check`."
    )
    early = slice(_FIRST_STEPS, max(_FIRST_STEPS + 1, lowest // 2))
    start = float(np.median(smoothed[early]))
    fall = start - smoothed[lowest]
    if lowest > _FIRST_STEPS and fall > _NOTICEABLE * abs(start):
        slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
        # Before, what looks like a fall is one batch being easier than another.
        falling = np.array(smoothed[: lowest + 1]) < start - _BEGUN * fall
        steepest = int(np.argmin(np.where(falling, slopes, np.inf)))
        highest = rates[lowest] / 10
        # A late fall is the average's, which lags behind: that is near the divergence.
        suggestion = min(rates[steepest], highest)
        why = (
            f"The loss falls fastest at a learning rate of {rates[steepest]:.3g}, and "
            f"is lowest at {rates[lowest]:.3g}; a tenth of that, {highest:.3g}, is "
            "about the highest that a schedule should reach"
        )
        why += "." if suggestion < highest else ", and what is suggested."
    curves = tuple(rates), tuple(losses), tuple(smoothed)
    return LearningRates(model.name, *curves, suggestion, highest, why_it_ended, why)


def _losses(
    model: keras.Model, batches: tf.data.Dataset, rates: Sequence[float]
) -> tuple[list[float], str]:
    """Returns the loss of each step, and why there are no more."""
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    with model.distribute_strategy.scope():
        rate = keras.Variable(float(rates[0]), dtype="float32", trainable=False)
    losses: list[float] = []
    trainer.drop_traced_functions(model)
    step = around_training.on_batch(model)
    try:
        with (
            replaced(inner, _learning_rate=rate),
            progress("Trying learning rates", len(rates), unit="steps") as done,
        ):
            for number, (each, batch) in enumerate(zip(rates, batches, strict=False)):
                rate.assign(float(each))
                model.reset_metrics()  # else the loss is the mean of all steps
                loss = float(tf.convert_to_tensor(step(batch)["loss"]))
                if not math.isfinite(loss):
                    return losses, "a loss is not finite"
                losses.append(loss)
                done(number + 1)
                smoothed = _smoothed(losses)
                is_high = abs(smoothed[-1]) > _DIVERGED * abs(min(smoothed))
                if len(losses) > _FIRST_STEPS and is_high:
                    return losses, "it diverged"
        is_done = len(losses) == len(rates)
        return losses, "all rates were tried" if is_done else "the data came to an end"
    finally:
        trainer.drop_traced_functions(model)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the average over the last losses at each step."""
    total, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        total = _MEMORY * total + (1 - _MEMORY) * loss
        found.append(total / (1 - _MEMORY**number))
    return found


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
    by its square root, as suits Adam. In the warm-up of so many updates the factor
    grows evenly from 1. Both rules hold up to some size only: measure. A TypeError or
    ValueError names an argument that is out of range.

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


if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_attributes(__name__, {})
