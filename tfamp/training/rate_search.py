"""`tfamp.training.lr_find`: a range test of the learning rate."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import trainer
from tfamp.keras_hooks.patches import replaced
from tfamp.machine import amx
from tfamp.records import checks
from tfamp.records.progress import progress
from tfamp.stepping.arguments import build, check_model, checked_dataset, first_batch
from tfamp.stepping.unchanged import unchanged
from tfamp.training.rate_records import LearningRates

# Of the average over steps, as is usual for this test.
_MEMORY = 0.9
# A smoothed loss so many times as high as the lowest one has diverged.
_DIVERGED = 4.0
# Steps at the beginning that no suggestion rests on: their average is of few.
_FIRST_STEPS = 5
# Part of the first loss that a fall must come to, and part of the fall from which on
# it has begun.
_NOTICEABLE, _BEGUN = 0.02, 0.1


def lr_find(
    model: keras.Model,
    data: Any,
    *,
    min_rate: float = 1e-7,
    max_rate: float = 10.0,
    num_steps: int = 100,
) -> LearningRates:
    """Trains some steps at rates that grow from step to step, and says which suits.

    The rate grows by the same factor each step until the loss diverges. Where the loss
    falls fastest lies a rate that trains well from the start; a tenth of the one at the
    lowest loss is about the highest that a schedule should reach. The test holds for
    this model, policy and batch size. Weights, optimizer, loss scale, metrics and seeds
    are afterwards what they were.

    Args:
        model: A compiled model.
        data: A `tf.data.Dataset` of batches or a `Pipeline`; it is read again from the
            start where it ends.
        min_rate: The first rate.
        max_rate: The last one.
        num_steps: Steps from one to the other.

    Returns:
        The `LearningRates`: `.suggestion`, `.highest`, `.rates`, `.losses`, `.table()`,
        `.plot(path)`, `.to_json(path)`.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` no dataset.
        ValueError: Rates are out of order, the data is empty or comes in single
            examples, or the first loss is not finite.

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
    amx.avoid()
    dataset = checked_dataset(data)
    build(model, first_batch(dataset))
    rates = np.geomspace(low, high, num_steps).tolist()
    with unchanged(model):
        losses, why_it_ended = _losses(model, _batches(dataset), rates)
    if not losses:
        raise ValueError(
            f"The first loss of {model.name!r} is not finite; expected a healthy "
            "model. Ask `tfamp.triage(model, batch)` for the cause."
        )
    return _judged(model.name, rates[: len(losses)], losses, why_it_ended)


def _batches(dataset: tf.data.Dataset) -> Iterator[Any]:
    while True:
        yield from dataset


def _losses(
    model: keras.Model, batches: Iterator[Any], rates: Sequence[float]
) -> tuple[list[float], str]:
    """Returns the loss of each step, and why there are no more."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with model.distribute_strategy.scope():
        rate = keras.Variable(float(rates[0]), dtype="float32", trainable=False)
    losses: list[float] = []
    smooth = _Smooth()
    trainer.drop_traced_functions(model)
    try:
        with (
            replaced(inner, _learning_rate=rate),
            progress("Trying learning rates", len(rates), unit="steps") as done,
        ):
            for number, each in enumerate(rates):
                rate.assign(float(each))
                loss = _step(model, next(batches))
                if not math.isfinite(loss):
                    return losses, "a loss is not finite"
                losses.append(loss)
                done(number + 1)
                if smooth.has_diverged(loss):
                    return losses, "it diverged"
        return losses, "all rates were tried"
    finally:
        trainer.drop_traced_functions(model)


def _step(model: keras.Model, batch: Any) -> float:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    model.reset_metrics()  # else the loss is the mean of all steps
    logs = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
    return float(tf.convert_to_tensor(logs["loss"]))


class _Smooth:
    """An average over the last losses, which begins at the first one."""

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0.0
        self._lowest, self._count = math.inf, 0

    def add(self, loss: float) -> float:
        self._sum = _MEMORY * self._sum + (1 - _MEMORY) * loss
        self._weight = _MEMORY * self._weight + (1 - _MEMORY)
        return self._sum / self._weight

    def has_diverged(self, loss: float) -> bool:
        now = self.add(loss)
        self._count += 1
        self._lowest = min(self._lowest, now)
        return self._count > _FIRST_STEPS and abs(now) > _DIVERGED * abs(self._lowest)


def _judged(
    name: str, rates: Sequence[float], losses: Sequence[float], why_it_ended: str
) -> LearningRates:
    smooth = _Smooth()
    smoothed = [smooth.add(loss) for loss in losses]
    lowest = int(np.argmin(smoothed))
    suggestion = highest = None
    why = (
        f"The loss of {name!r} fell at no rate up to {rates[-1]:.3g}: is the model "
        "able to learn from this data? Try more steps, or `tfamp.lint`."
    )
    start = float(
        np.median(smoothed[_FIRST_STEPS : max(_FIRST_STEPS + 1, lowest // 2)])
    )
    fall = start - smoothed[lowest]
    if lowest > _FIRST_STEPS and fall > _NOTICEABLE * abs(start):
        slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
        # Before, what looks like a fall is one batch being easier than another.
        falling = np.array(smoothed[: lowest + 1]) < start - _BEGUN * fall
        steepest = int(np.argmin(np.where(falling, slopes, np.inf)))
        suggestion, highest = float(rates[steepest]), float(rates[lowest]) / 10
        why = (
            f"The loss of {name!r} falls fastest at a learning rate of "
            f"{suggestion:.3g}, and is lowest at {rates[lowest]:.3g}; {highest:.3g} is "
            "about the highest that a schedule should reach."
        )
    return LearningRates(
        name,
        tuple(map(float, rates)),
        tuple(losses),
        tuple(smoothed),
        suggestion,
        highest,
        why_it_ended,
        why,
    )
