"""`tfamp.ranges`: how large the numbers of a model are, and what float16 holds."""

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.passes import Recording, batches_of, exactly, record
from tfamp.records import checks, console
from tfamp.records.formats import FLOAT16, FORMATS, HALF, Format
from tfamp.records.record import Record, TableRecord
from tfamp.stepping.eager_step import Site, floats
from tfamp.stepping.layer_calls import is_layer, runs_whole
from tfamp.stepping.unchanged import seeds_put_back

Kind = Literal["weights", "activations", "gradients"]
_COLORS: dict[Kind, str] = {
    "weights": "#4c78a8",
    "activations": "#54a24b",
    "gradients": "#e45756",
}
# The powers of two of float32's numbers, and the scales of a loss-scale optimizer.
_LOWEST, _HIGHEST = -149, 127
# The lowest of those with all digits; the bits of a number without its sign.
_NORMAL, _MAGNITUDE = -126, np.uint32(0x7FFFFFFF)
_SCALES = range(-14, 25)
# Scales are as good where they spoil this much more of the gradients at most.
_AS_GOOD = 1e-4


class Fit(NamedTuple):
    """The parts of numbers that a format makes inf, or 0, or takes digits of."""

    overflow: float
    zero: float
    coarse: float

    @property
    def total(self) -> float:
        """Part that would be spoiled in any of these ways."""
        return sum(self)

    def __str__(self) -> str:
        """Returns the three parts, as a row of a table shows them."""
        texts = (f"{p:.1%}" if p >= 0.001 else "<0.1%" if p else "·" for p in self)
        return " / ".join(texts) if self.total else "·"


@dataclasses.dataclass(frozen=True)
class LayerRange(Record):
    """The numbers of one kind in one layer or operation of a Functional graph.

    "activations" are its outputs, "gradients" those of the loss by its outputs and
    weights, without a loss scale. `smallest` and `largest` are magnitudes of numbers
    that are finite and not 0; `exponents` says how many lie in [2**e, 2**(e+1)), by e.
    """

    path: str
    class_name: str
    kind: Kind
    count: int = 0
    zeros: int = 0
    nonfinite: int = 0
    smallest: float = math.inf
    largest: float = 0.0
    exponents: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def fit(self, format: str) -> Fit:
        """Returns what "float16" or "bfloat16" would do to them."""
        checks.choice("format", format, HALF)
        return _fit(_bins([self]), FORMATS[format])

    def and_of(self, tensor: Any) -> "LayerRange":
        """Returns the record with the numbers of one more tensor."""
        values = np.asarray(tf.cast(tensor, tf.float32)).ravel()
        # Bits of magnitudes are as large as those, and begin with the exponent.
        bits = values.view(np.uint32) & _MAGNITUDE
        found = np.bincount(bits >> 23, minlength=256)
        nonfinite, zeros = int(found[255]), int(values.size - np.count_nonzero(bits))
        bins = _bins([self])
        bins[_NORMAL - _LOWEST :] += found[1:255]
        if found[0] > zeros:  # numbers with fewer digits
            small = values[(bits > 0) & (bits < 1 << 23)]
            bins += np.bincount(np.frexp(small)[1] - 1 - _LOWEST, minlength=len(bins))
        if nonfinite:
            bits = bits[bits < 255 << 23]
        smallest, largest = self.smallest, self.largest
        if values.size > zeros + nonfinite:
            least = np.uint32((bits - np.uint32(1)).min() + 1)  # 0 comes round to last
            smallest = min(smallest, float(least.view(np.float32)))
            largest = max(largest, float(bits.max().view(np.float32)))
        return dataclasses.replace(
            self,
            count=self.count + values.size,
            zeros=self.zeros + zeros,
            nonfinite=self.nonfinite + nonfinite,
            smallest=smallest,
            largest=largest,
            exponents={str(i + _LOWEST): int(bins[i]) for i in np.flatnonzero(bins)},
        )


@dataclasses.dataclass(frozen=True)
class Ranges(TableRecord):
    """How large the numbers of a model are in float32, layer by layer.

    `best_loss_scale` is the power of two that gradients fit float16 best with,
    `loss_scales` are the smallest and the largest one as good, `lost_gradients` the
    parts of the gradients that float16 would spoil at scale 1 and at the best one.
    """

    model: str
    num_batches: int
    layers: tuple[LayerRange, ...]
    best_loss_scale: float
    loss_scales: tuple[float, float]
    lost_gradients: tuple[float, float]

    def of(self, kind: Kind) -> tuple[LayerRange, ...]:
        """Returns the layers' records of one kind."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def table(self) -> str:
        """Returns a table of at most 110 columns, a line for each layer and kind."""
        rows = []
        for layer in self.layers:
            ends = (layer.smallest, layer.largest)
            texts = (f"{end:.1e}" if 0 < end < math.inf else "-" for end in ends)
            fits = (str(layer.fit(name)) for name in HALF)
            rows.append((layer.path, layer.kind, *texts, *fits))
        right, fit = console.RIGHT, {**console.FOLD, "justify": "right"}
        columns = {"layer": console.FOLD, "kind": console.WHOLE}
        columns |= {"smallest": right, "largest": right, **dict.fromkeys(HALF, fit)}
        title = (
            f"{self.model}: magnitudes in float32 over {self.num_batches} batches; "
            "what formats would spoil (overflow / to zero / few digits)"
        )
        table = console.table(columns, rows, title=title)
        return console.text_of(table, self.scale_sentence)

    @property
    def scale_sentence(self) -> str:
        """The best loss scale and what it saves, in one sentence."""
        (low, high), (before, after) = self.loss_scales, self.lost_gradients
        return (
            f"Gradients fit float16 best with a loss scale of {self.best_loss_scale:g} "
            f"(from {low:g} to {high:g}): {after:.2%} of them are spoiled, without one "
            f"{before:.2%}."
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the magnitudes beside float16's limits, also into an image file.

        The matplotlib figure is returned; an ImportError says that it is missing.
        """
        height = 1.8 + 0.28 * len(self.layers)
        figure = checks.figure("`Ranges.plot`", 10.0, float(np.clip(height, 3.0, 60.0)))
        axes = figure.subplots()
        for row, layer in enumerate(self.layers):
            counts = np.array([*layer.exponents.values()], float)
            # Rare numbers are what overflows: even one of a million is to be seen.
            heights = 0.15 + 0.7 * counts / counts.max(initial=1)
            places = [int(exponent) + 0.5 for exponent in layer.exponents]
            axes.bar(places, -heights, 0.9, row + 0.4, color=_COLORS[layer.kind])
        for limit in (FLOAT16.smallest_subnormal, FLOAT16.max):
            axes.axvline(math.log2(limit), color="#555555", linewidth=1.0)
        names = [f"{layer.path}  {layer.kind}" for layer in self.layers]
        axes.set_yticks(range(len(self.layers)), names, fontsize="small")
        axes.invert_yaxis()
        axes.set_xlabel("magnitude, as a power of 2; lines: the limits of float16")
        axes.set_title(f"{self.model}: magnitudes in float32", loc="left")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


def ranges(
    model: keras.Model, data: Any, *, num_batches: int = 4, batch_size: int = 32
) -> Ranges:
    """Looks at the magnitudes of weights, activations and gradients in float32.

    A few train steps run in float32, eagerly and without rules; the model is afterwards
    what it was. Gradients by an output that a loss takes as logits are not counted.
    Arguments and errors are those of `tfamp.sensitivity`.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.float32([[1, 70000], [3, 4]])
        >>> found = ranges(model, (x, np.float32([[0], [0]])))
        >>> found.of("weights")[0].fit("float16").overflow
        0.0
    """
    with seeds_put_back():
        batches = batches_of(model, data, num_batches, batch_size)
        with exactly(model) as sites:
            recordings = (record(model, sites, batch) for batch in batches)
            return tallied(model.name, sites, recordings)


def tallied(
    name: str, sites: Sequence[Site], recordings: Iterable[Recording]
) -> Ranges:
    """Returns the magnitudes in float32 steps, which are dropped one by one."""
    counted: dict[tuple[str, Kind], LayerRange] = {}
    owner: dict[int, Site] = {}

    def count(site: Site, kind: Kind, tensor: Any) -> None:
        new = LayerRange(site.path, site.class_name, kind)
        counted[site.path, kind] = counted.get((site.path, kind), new).and_of(tensor)

    for site in sites:
        layer = site.layer
        is_whole = is_layer(layer) and runs_whole(layer) and structure.children(layer)
        own = structure.own_weights(layer) if is_layer(layer) else []
        for weight in layer.weights if is_whole else own:
            owner[id(weight)] = site
            if "float" in weight.dtype:
                count(site, "weights", weight.value)
    num_batches = 0
    for recording in recordings:
        num_batches += 1
        for call in recording.calls:
            outputs = floats(call.outputs)
            for output, gradient in zip(outputs, call.output_gradients, strict=True):
                count(call.site, "activations", output)
                if gradient is not None and not hasattr(output, "_keras_logits"):
                    count(call.site, "gradients", gradient)
        for variable, gradient in recording.ran.step.gradients:
            if gradient is not None and id(variable) in owner:
                count(owner[id(variable)], "gradients", gradient)
    keys = [(site.path, kind) for site in sites for kind in _COLORS]
    layers = tuple(counted[key] for key in keys if key in counted)
    bins = _bins(each for each in layers if each.kind == "gradients")
    best, scales = _best_loss_scale(bins)
    lost = [_fit(bins, FLOAT16, round(math.log2(s))).total for s in (1.0, best)]
    return Ranges(name, num_batches, layers, best, scales, (lost[0], lost[1]))


def _bins(layers: Iterable[LayerRange]) -> np.ndarray:
    """Returns how many numbers have which power of two, from `_LOWEST` on."""
    bins = np.zeros(_HIGHEST - _LOWEST + 1)
    for layer in layers:
        for exponent, count in layer.exponents.items():
            bins[int(exponent) - _LOWEST] += count
    return bins


def _fit(bins: np.ndarray, format: Format, scale: int = 0) -> Fit:
    """Returns what a format does to numbers times 2**`scale`.

    Half of the smallest number of a format, a tie, counts as kept; so does what is
    between the largest one and the next power of two.
    """
    powers = np.arange(_LOWEST, _HIGHEST + 1) + scale
    over = bins[powers > format.max_exponent].sum()
    zero = bins[powers < math.log2(format.smallest_subnormal) - 1].sum()
    below = bins[powers < math.log2(format.smallest_normal)].sum()
    total = max(float(bins.sum()), 1.0)
    return Fit(*(float(part) / total for part in (over, zero, below - zero)))


def _best_loss_scale(bins: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Returns the scale that float16 holds gradients best with, and those as good.

    What overflows costs the whole step, what vanishes only its own part of it; what
    keeps some digits is half as bad. It lies in the middle of those that are as good.
    """
    fits = [_fit(bins, FLOAT16, scale) for scale in _SCALES]
    losses = [fit.zero + fit.coarse / 2 + (fit.overflow > 0) for fit in fits]
    limit = min(losses) + _AS_GOOD
    good = [s for s, loss in zip(_SCALES, losses, strict=True) if loss <= limit]
    middle = (good[0] + good[-1] + 1) // 2
    return 2.0**middle, (2.0 ** good[0], 2.0 ** good[-1])
