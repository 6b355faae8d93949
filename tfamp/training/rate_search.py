"""`tfamp.training.lr_find`: a range test of the learning rate."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import around_training, trainer
from tfamp.keras_hooks.patches import replaced
from tfamp.machine import cpus
from tfamp.records import checks, console
from tfamp.records.console import progress
from tfamp.records.record import Record
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged

# Of the average over steps, as is usual for this test.
_MEMORY = 0.9
# A smoothed loss so many times as high as the lowest one has diverged.
_DIVERGED = 4.0
# Steps at the beginning that no suggestion rests on: their average is of few.
_FIRST_STEPS = 5
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
    # Where the smoothed loss falls fastest, but no more than `highest`; a tenth of the
    # rate at which it was lowest. None where it never falls.
    suggestion: float | None
    highest: float | None
    why_it_ended: str
    why: str  # what the suggestion rests on, in one sentence

    def __str__(self) -> str:
        return f"{self.why}\n{self.table()}"

    def table(self, rows: int = 12) -> str:
        """Returns some of the steps as a table, evenly spread, at most so many."""
        every = max(1, -(-len(self.rates) // rows))
        columns = (self.rates, self.losses, self.smoothed)
        shown = [
            (f"{rate:.3g}", f"{loss:.4g}", f"{smoothed:.4g}")
            for rate, loss, smoothed in list(zip(*columns, strict=True))[::every]
        ]
        names = ("learning rate", "loss", "smoothed")
        title = f"{self.model}: {len(self.rates)} steps, then {self.why_it_ended}"
        table = console.table(dict.fromkeys(names, console.RIGHT), shown, title=title)
        return console.text_of(table, width=100)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the losses against the rates into an image file; needs matplotlib."""
        figure = checks.figure("`LearningRates.plot`", 8.0, 4.5)
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="#bbbbbb", label="loss of a batch")
        axes.plot(self.rates, self.smoothed, color="#4c78a8", label="smoothed")
        for label, line in (("suggestion", "-"), ("highest", ":")):
            if (rate := getattr(self, label)) is not None:
                text = f"{label}: {rate:.2g}"
                axes.axvline(rate, color="#e45756", linestyle=line, label=text)
        axes.set_xscale("log")
        low, high = min(self.smoothed), max(self.smoothed[: len(self.rates) // 2 + 1])
        axes.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low) + 1e-12)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.set_title(f"{self.model}: range test of the learning rate")
        axes.legend()
        figure.savefig(path, dpi=120)


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
    suggested. The test holds for this model, policy and batch size. Weights, optimizer,
    loss scale, metrics and seeds are afterwards what they were.

    Args:
        model: A compiled model.
        data: What `fit` takes. It is read again from the start where it ends.
        min_rate: The first rate.
        max_rate: The last one.
        num_steps: Steps from one to the other.
        batch_size: Examples in a batch of arrays.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not of these.
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
    return _judged(model.name, rates[: len(losses)], losses, why_it_ended)


def _losses(
    model: keras.Model, batches: tf.data.Dataset, rates: Sequence[float]
) -> tuple[list[float], str]:
    """Returns the loss of each step, and why there are no more."""
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
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
        if len(losses) < len(rates):
            return losses, "the data came to an end, and cannot be read again"
        return losses, "all rates were tried"
    finally:
        trainer.drop_traced_functions(model)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the average over the last losses at each step."""
    total, weight = 0.0, 0.0
    found = []
    for loss in losses:
        total = _MEMORY * total + (1 - _MEMORY) * loss
        weight = _MEMORY * weight + (1 - _MEMORY)
        found.append(total / weight)
    return found


def _judged(
    name: str, rates: Sequence[float], losses: Sequence[float], why_it_ended: str
) -> LearningRates:
    smoothed = _smoothed(losses)
    lowest = int(np.argmin(smoothed))
    suggestion = highest = None
    why = (
        f"The loss of {name!r} fell at no rate up to {rates[-1]:.3g}: is the model "
        "able to learn from this data? Try more steps, or `tfamp.lint`."
    )
    early = slice(_FIRST_STEPS, max(_FIRST_STEPS + 1, lowest // 2))
    start = float(np.median(smoothed[early]))
    fall = start - smoothed[lowest]
    if lowest > _FIRST_STEPS and fall > _NOTICEABLE * abs(start):
        slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
        # Before, what looks like a fall is one batch being easier than another.
        falling = np.array(smoothed[: lowest + 1]) < start - _BEGUN * fall
        steepest = int(np.argmin(np.where(falling, slopes, np.inf)))
        highest = float(rates[lowest]) / 10
        # A late fall is the average's, which lags behind: that is near the divergence.
        suggestion = min(float(rates[steepest]), highest)
        why = (
            f"The loss of {name!r} falls fastest at a learning rate of "
            f"{rates[steepest]:.3g}, and is lowest at {rates[lowest]:.3g}; a tenth of "
            f"that, {highest:.3g}, is about the highest that a schedule should reach"
        )
        why += "." if suggestion < highest else ", and what is suggested."
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
