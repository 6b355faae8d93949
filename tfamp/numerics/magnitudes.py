"""`tfamp.ranges`: numbers of a few float32 steps by exponent, and what formats hold."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.range_records import (
    KINDS,
    LOW_FORMATS,
    Fit,
    Kind,
    LayerRange,
    Ranges,
)
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.formats import FLOAT16, FLOAT32, FORMATS, Format
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.eager_step import (
    Call,
    Observer,
    Site,
    floats,
    run_step,
    sites,
    tapped,
)
from tfamp.stepping.layer_calls import computes_itself, in_float32
from tfamp.stepping.unchanged import seeds_put_back, unchanged

# Numbers are counted by exponent and the first bits of the mantissa, which is as fine
# as the largest numbers of both float8 formats need.
_MANTISSA_BITS = 4
_SHIFT = FLOAT32.mantissa_bits - _MANTISSA_BITS
_BINS = 2 ** (FLOAT32.exponent_bits + _MANTISSA_BITS)
_PER_EXPONENT = 2**_MANTISSA_BITS
_SPECIAL = 255  # exponent of inf and NaN
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
    with seeds_put_back():
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


class Exponents:
    """Numbers counted by magnitude.

    Example:
        >>> counted = Exponents()
        >>> counted.add(np.float32([0, 1, 1.5, -3, 70000, np.inf]))
        >>> counted.by_exponent()
        {0: 2, 1: 1, 16: 1}
        >>> counted.zeros, counted.nonfinite, counted.largest
        (1, 1, 70000.0)
    """

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, np.int64)
        self.count, self.zeros, self.nonfinite = 0, 0, 0
        self.smallest, self.largest = math.inf, 0.0

    def add(self, values: np.ndarray) -> None:
        """Counts the numbers of an array; it is read as float32."""
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        magnitudes = np.abs(flat)
        bins = np.bincount(magnitudes.view(np.uint32) >> _SHIFT, minlength=_BINS)
        bins = bins[:_BINS]
        special = _SPECIAL * _PER_EXPONENT
        self.count += flat.size
        self.nonfinite += int(bins[special:].sum())
        bins[special:] = 0
        zeros = flat.size - int(np.count_nonzero(flat))
        self.zeros += zeros
        bins[0] -= zeros
        self._bins += bins
        if bins.any():
            usable = magnitudes[(magnitudes > 0) & (magnitudes < math.inf)]
            self.smallest = min(self.smallest, float(usable.min()))
            self.largest = max(self.largest, float(usable.max()))

    def merge(self, other: "Exponents") -> None:
        """Counts what another one has counted, too."""
        self._bins += other._bins
        self.count += other.count
        self.zeros += other.zeros
        self.nonfinite += other.nonfinite
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    @property
    def usable(self) -> int:
        """How many numbers are finite and not 0."""
        return self.count - self.zeros - self.nonfinite

    def by_exponent(self) -> dict[int, int]:
        """Returns how many numbers lie in [2**e, 2**(e+1)), by e.

        Numbers below float32's smallest normal one count with 2**-127.
        """
        counts = self._bins.reshape(-1, _PER_EXPONENT).sum(axis=1)
        return {
            int(exponent) - FLOAT32.bias: int(counts[exponent])
            for exponent in np.flatnonzero(counts)
        }

    def in_format(self, format: Format, scale: float = 1.0) -> Fit:
        """Returns what a format does to the numbers times a scale, a power of two.

        Example:
            >>> from tfamp.records.formats import FLOAT16
            >>> counted = Exponents()
            >>> counted.add(np.float32([1e-9, 1e-6, 1, 1e6]))
            >>> counted.in_format(FLOAT16)
            Fit(format='float16', overflow=0.25, zero=0.25, coarse=0.25)
            >>> counted.in_format(FLOAT16, scale=2.0**10)
            Fit(format='float16', overflow=0.25, zero=0.0, coarse=0.25)
        """
        if not self.usable:
            return Fit(format.name, 0.0, 0.0, 0.0)
        over = first_overflow(format) / scale
        flushed = format.smallest_subnormal / 2 / scale
        normal = format.smallest_normal / scale
        num_over = int(self._bins[_bin(over) :].sum()) if self.largest >= over else 0
        # A half of the smallest number is rounded to 0, the even neighbour: numbers
        # just above it are taken for it, one sixteenth of a power of two.
        num_zero = int(self._bins[: _bin(flushed)].sum())
        num_coarse = int(self._bins[: _bin(normal)].sum()) - num_zero
        counts = (num_over, num_zero, num_coarse)
        return Fit(format.name, *(number / self.usable for number in counts))


def first_overflow(format: Format) -> float:
    """Returns the smallest magnitude that a format rounds to inf or NaN.

    Example:
        >>> from tfamp.records.formats import FLOAT16, FLOAT8_E5M2
        >>> first_overflow(FLOAT16), first_overflow(FLOAT8_E5M2)
        (65520.0, 61440.0)
    """
    exponent = math.frexp(format.max)[1] - 1
    return format.max + math.ldexp(format.epsilon, exponent) / 2


def _bin(magnitude: float) -> int:
    """Returns the number of the bin that a magnitude falls into."""
    within = np.float32(min(max(magnitude, 0.0), FLOAT32.max))
    return int(within.view(np.uint32) >> _SHIFT)


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
