"""`tfamp.ranges`: looks at the magnitudes of all numbers in a few float32 steps."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.ranges.exponents import Exponents
from tfamp.numerics.ranges.result import KINDS, LOW_FORMATS, Kind, LayerRange, Ranges
from tfamp.records import checks
from tfamp.records.formats import FLOAT16, FORMATS
from tfamp.records.progress import progress
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.eager_step import run_step
from tfamp.stepping.layer_calls import computes_itself
from tfamp.stepping.layer_precision import in_float32
from tfamp.stepping.taps import Call, Observer, Site, floats, sites, tapped
from tfamp.stepping.unchanged import unchanged

# The scales that a loss-scale optimizer may take.
_SCALES = tuple(2.0**power for power in range(-14, 25))
# Scales are as good where they spoil this much more of the gradients at most.
_AS_GOOD = 1e-4
# A number that keeps some digits is half as bad as one that vanishes.
_COARSE = 0.5


def ranges(
    model: keras.Model, data: Any, *, num_batches: int = 4, batch_size: int = 32
) -> Ranges:
    """Looks at the magnitudes of weights, activations and gradients in float32.

    A few train steps run in float32, eagerly and without rules, at the weights the
    model has; nothing is updated, and weights, optimizers, metrics and seeds are
    afterwards what they were. What is 0 in float32 is 0 in every format and not
    counted.

    Args:
        model: A compiled model, written in whatever way.
        data: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        num_batches: How many batches to look at.
        batch_size: Examples in a batch of arrays.

    Returns:
        The `Ranges`: `.layers`, `.best_loss_scale`, `.table()`, `.to_json(path)` and
        `.plot(path)`.

    Raises:
        TypeError: `model` is not a compiled Keras model, or `data` not of these.
        ValueError: The data is empty or comes in single examples.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.float32([[1, 70000], [3, 4]])
        >>> found = ranges(model, (x, np.float32([[0], [0]])))
        >>> found.of("weights")[0].fit("float16").overflow
        0.0
    """
    checks.positive_int("num_batches", num_batches)
    check_model(model)
    dataset = dataset_of(data, batch_size)
    build(model, first_batch(dataset))
    counted = _Counted(model)
    seen = 0
    with (
        in_float32(model),
        unchanged(model),
        tapped(model, counted, only=computes_itself),
        progress("Counting magnitudes", num_batches, unit="batches") as done,
    ):
        for batch in dataset.take(num_batches):
            step = run_step(model, batch)
            counted.add_weight_gradients(step.gradients)
            seen += 1
            done(seen)
        counted.add_weights()
    layers = tuple(counted.records())
    every = counted.all_gradients()
    best, scales = best_loss_scale(every)
    lost = tuple(every.in_format(FLOAT16, scale).total for scale in (1.0, best))
    return Ranges(model.name, seen, layers, best, scales, (lost[0], lost[1]))


def best_loss_scale(gradients: Exponents) -> tuple[float, tuple[float, float]]:
    """Returns the scale that float16 holds unscaled gradients best with.

    It lies in the middle of those that are as good, whose limits come with it.

    Example:
        >>> gradients = Exponents()
        >>> gradients.add(np.float32([2.0**-40, 2.0**-20]))
        >>> best_loss_scale(gradients)
        (1048576.0, (32768.0, 16777216.0))
    """
    # What overflows costs the whole step, what vanishes only its own part of it.
    losses = []
    for scale in _SCALES:
        shares = gradients.in_format(FLOAT16, scale)
        losses.append(shares.zero + _COARSE * shares.coarse + (shares.overflow > 0))
    least = min(losses)
    good = [
        s for s, loss in zip(_SCALES, losses, strict=True) if loss <= least + _AS_GOOD
    ]
    low, high = good[0], good[-1]
    middle = 2.0 ** round((math.log2(low) + math.log2(high) + 0.5) / 2)
    return min(max(middle, low), high), (low, high)


class _Counted(Observer):
    """Counts what goes through the layers of a model."""

    wants_gradients = True

    def __init__(self, model: keras.Model) -> None:
        self._sites = sites(model)
        self._tallies: dict[tuple[str, Kind], Exponents] = {}
        self._weights = [
            (weight, site)
            for site in self._sites
            if isinstance(site.layer, keras.layers.Layer)
            for weight in structure.own_weights(site.layer)
        ]

    def on_outputs(self, call: Call, outputs: Any) -> None:
        for tensor in floats(outputs):
            self._add(call.site, "activations", tensor)

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        if of == "outputs":
            self._add(call.site, "gradients", gradient)

    def add_weight_gradients(self, gradients: Any) -> None:
        """Counts the gradients of weights with those of their layer."""
        owners = {id(weight): site for weight, site in self._weights}
        for variable, gradient in gradients:
            if id(variable) in owners and gradient is not None:
                self._add(owners[id(variable)], "gradients", gradient)

    def add_weights(self) -> None:
        """Counts the weights."""
        for weight, site in self._weights:
            if "float" in weight.dtype:
                self._add(site, "weights", weight.value)

    def all_gradients(self) -> Exponents:
        """Returns the gradients of all layers together."""
        every = Exponents()
        for (_, kind), tally in self._tallies.items():
            if kind == "gradients":
                every.merge(tally)
        return every

    def records(self) -> Iterator[LayerRange]:
        """Yields a record for each layer and kind that has numbers."""
        for site in self._sites:
            for kind in KINDS:
                if tally := self._tallies.get((site.path, kind)):
                    yield LayerRange(
                        site.path,
                        site.class_name,
                        kind,
                        tally.count,
                        tally.zeros,
                        tally.nonfinite,
                        tally.smallest,
                        tally.largest,
                        {str(e): count for e, count in tally.by_exponent().items()},
                        tuple(tally.in_format(FORMATS[name]) for name in LOW_FORMATS),
                    )

    def _add(self, site: Site, kind: Kind, tensor: Any) -> None:
        tally = self._tallies.setdefault((site.path, kind), Exponents())
        tally.add(np.asarray(tf.cast(tensor, tf.float32)))
