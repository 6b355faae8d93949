"""Which layers int8 would spoil, and by what, from one pass over a batch.

Each layer with a kernel runs again on what it got in float32, its inputs and weights
rounded as int8 rounds them. What comes out is compared with what it gave, relative to
how much that differs over the batch.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.sensitivity.errors import forward_error
from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.stepping.eager_step import Call, Observer, Site, floats, is_float, tapped
from tfamp.stepping.layer_calls import units

Mode = Literal["weights", "dynamic", "static"]
# An error of outputs from which a layer is expected to break a metric.
_GUILTY = 0.1
# A channel this many times as large as the one in the middle leaves the others less
# than three bits of the eight.
_OUTLIER = 20.0
_WEIGHT_STEPS = 127
_ACTIVATION_STEPS = 255
# What has fewer dimensions, such as a bias, stays in float in every runtime.
_MIN_RANK = 2
# Examples of the pass: all that went through the layers is held at once.
_MAX_EXAMPLES = 32
# What rescales its channels ends the search for where an outlier comes from, unless a
# runtime folds it into the layer ahead of it.
_RESCALING = (
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.Normalization,
)


@dataclasses.dataclass(frozen=True)
class LayerError(Record):
    """What int8 does to one layer alone.

    Args:
        path: The layer.
        class_name: Its class.
        error: Of its outputs with inputs and weights rounded, relative to their spread
            over the batch; the worst of its calls.
        weight_error: With rounded weights only.
        outlier: How many times the middle channel the largest one of its inputs is.
        producers: Layers with a kernel that its outlier comes from.
        reason: What spoils it, with the figures; "" where nothing does.
    """

    path: str
    class_name: str
    error: float
    weight_error: float
    outlier: float
    producers: tuple[str, ...] = ()
    reason: str = ""

    @property
    def is_guilty(self) -> bool:
        """Whether it is expected to break a metric."""
        return not self.error < _GUILTY


@dataclasses.dataclass(frozen=True)
class Ranking(TableRecord):
    """The layers that int8 rounds, the most spoilt first.

    Args:
        model: The model's name.
        mode: "weights", "dynamic" or "static".
        num_examples: That went through.
        layers: What each came to.
    """

    model: str
    mode: Mode
    num_examples: int
    layers: tuple[LayerError, ...]

    def table(self) -> str:
        """Returns a line for each layer, at most 110 columns."""
        rows = [
            (e.path, e.class_name, f"{e.error:.2g}", f"{e.weight_error:.2g}", e.reason)
            for e in self.layers
        ]
        columns = {
            "layer": console.FOLD,
            "class": console.FOLD,
            "error": console.RIGHT,
            "by weights": console.RIGHT,
            "why": {**console.FOLD, "ratio": 1},
        }
        title = f"{self.model} in int8, {self.mode}: errors over the spread of outputs"
        return console.text_of(console.table(columns, rows, title=title))


def rank(model: keras.Model, inputs: Any, *, mode: Mode = "dynamic") -> Ranking:
    """Ranks the layers of a float32 model by what int8 does to each of them alone.

    The first 32 of the inputs go through it; it is as it was afterwards. "weights"
    rounds kernels only, "dynamic" and "static" what they are multiplied with, too.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> dense = keras.layers.Dense(4, name="logits")
        >>> model = keras.Sequential([keras.Input((8,)), dense])
        >>> found = rank(model, np.random.default_rng(0).normal(size=(16, 8)))
        >>> found.layers[0].path, found.layers[0].is_guilty
        ('logits', False)
    """
    recorder = _Recorder(model)
    given = structure.map_structure(_first_examples, inputs)
    with tapped(model, recorder, only=lambda site: id(site.layer) in recorder.watched):
        model(given, training=False)
    found = []
    for site in recorder.products:
        errors = [
            _error_of(call, outputs, recorder, mode)
            for call, outputs in recorder.calls
            if call.site.layer is site.layer
        ]
        if errors:
            found.append(max(errors, key=lambda each: each.error))
    found.sort(key=lambda each: -each.error)
    number = len(tf.nest.flatten(given)[0])
    return Ranking(model.name, mode, number, tuple(found))


class _Recorder(Observer):
    """Keeps what goes into layers, and who made it."""

    def __init__(self, model: keras.Model) -> None:
        sites = units(model)
        # Not what only holds others with kernels, such as an attention layer.
        self.products = [site for site in sites if kernels_of(site.layer)]
        self.watched = {id(site.layer) for site in sites}
        self.calls: list[tuple[Call, Any]] = []
        self._makers: dict[int, Call] = {}

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Keeps the outputs, whose maker is the innermost layer that returned them."""
        self.calls.append((call, outputs))
        given = {id(each) for each in floats((call.args, call.kwargs))}
        for each in floats(outputs):
            if id(each) not in given:  # a Dropout hands on what it gets
                self._makers.setdefault(id(each), call)

    def producers_of(self, tensor: Any) -> list[Site]:
        """Returns the layers with kernels that an outlier channel comes from."""
        found: list[Site] = []
        seen: set[int] = set()
        open_ones = [tensor]
        while open_ones:
            maker = self._makers.get(id(open_ones.pop()))
            if maker is None or id(maker) in seen:
                continue
            seen.add(id(maker))
            if kernels_of(maker.site.layer):
                found.append(maker.site)
            elif not isinstance(maker.site.layer, _RESCALING):
                sources = floats((maker.args, maker.kwargs))
                with_outlier = [x for x in sources if _has_outlier(x)]
                # A batch normalization may make the outlier: it is folded away.
                open_ones += with_outlier or sources[:1]
        return found


def _error_of(call: Call, outputs: Any, recorder: _Recorder, mode: Mode) -> LayerError:
    exact = _arrays(outputs)
    with _rounded(call.site.layer):
        error = by_weights = _off(call, exact, rounds_inputs=False)
        if mode != "weights":
            error = _off(call, exact, rounds_inputs=True)
    inputs = floats((call.args, call.kwargs))
    outliers = [outlier_ratio(np.asarray(x)) for x in inputs]
    at = max(range(len(inputs)), key=lambda i: outliers[i][1], default=None)
    channel, ratio = (0, 1.0) if at is None else outliers[at]
    producers: tuple[str, ...] = ()
    if at is not None and ratio >= _OUTLIER:
        producers = tuple(site.path for site in recorder.producers_of(inputs[at]))
    found = LayerError(
        call.site.path, call.site.class_name, error, by_weights, ratio, producers
    )
    return dataclasses.replace(found, reason=_reason(found, channel))


def _reason(found: LayerError, channel: int) -> str:
    if not found.is_guilty:
        return ""
    off = f"its outputs are off by {found.error:.2g} times their spread"
    if found.outlier >= _OUTLIER:
        text = f"channel {channel} of its inputs is {found.outlier:,.0f} times the "
        return f"an outlier channel: {text}middle one, and {off}"
    if found.weight_error >= found.error / 2:
        return f"its weights: {off}, by {found.weight_error:.2g} with rounded weights"
    return f"its activations: {off}"


def _off(call: Call, exact: Sequence[np.ndarray], *, rounds_inputs: bool) -> float:
    args, kwargs = call.args, call.kwargs
    if rounds_inputs:
        args, kwargs = structure.map_structure(_rounded_tensor, (args, kwargs))
    low = _arrays(call.site.layer.call(*args, **kwargs))
    return max(map(forward_error, low, exact), default=0.0)


@contextlib.contextmanager
def _rounded(layer: Any) -> Iterator[None]:
    """Rounds the kernels of a layer inside the block."""
    kernels = kernels_of(layer)
    held = [np.asarray(weight.value).copy() for weight, _ in kernels]
    try:
        for (weight, channels), value in zip(kernels, held, strict=True):
            weight.assign(rounded_weights(value, channels))
        yield
    finally:
        for (weight, _), value in zip(kernels, held, strict=True):
            weight.assign(value)


def _rounded_tensor(x: Any) -> Any:
    if not is_float(x):
        return x
    rounded = tf.constant(rounded_activations(np.asarray(x)))
    return structure.with_mask_of(x, rounded)


def _has_outlier(x: Any) -> bool:
    return outlier_ratio(np.asarray(x))[1] >= _OUTLIER


def _arrays(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in floats(outputs)]


def _first_examples(x: Any) -> Any:
    return tf.convert_to_tensor(x)[:_MAX_EXAMPLES]


def rounded_weights(values: np.ndarray, channels: Sequence[int]) -> np.ndarray:
    """Returns a kernel after int8 with one scale for each channel, symmetric around 0.

    Example:
        >>> kernel = np.array([[127.0, 0.4], [1.4, 0.2]])
        >>> rounded_weights(kernel, (1,)).round(2).tolist()
        [[127.0, 0.4], [1.0, 0.2]]
    """
    others = tuple(axis for axis in range(values.ndim) if axis not in channels)
    largest = np.abs(values).max(axis=others, keepdims=True, initial=0.0)
    scale = np.where(largest > 0, largest / _WEIGHT_STEPS, 1.0)
    return (np.round(values / scale) * scale).astype(values.dtype)


def rounded_activations(values: np.ndarray) -> np.ndarray:
    """Returns activations after uint8 with one scale and one zero point for all.

    Example:
        >>> rounded_activations(np.array([0.0, 0.3, 1.2, 255.0])).tolist()
        [0.0, 0.0, 1.0, 255.0]
    """
    low = min(float(values.min(initial=0.0)), 0.0)
    high = max(float(values.max(initial=0.0)), 0.0)
    scale = (high - low) / _ACTIVATION_STEPS
    if not (scale > 0 and np.isfinite(scale)):
        return values
    zero = np.round(-low / scale)
    steps = np.clip(np.round(values / scale) + zero, 0, _ACTIVATION_STEPS)
    return ((steps - zero) * scale).astype(values.dtype)


def outlier_ratio(values: np.ndarray) -> tuple[int, float]:
    """Returns the largest channel of activations, and how many times the middle it is.

    Example:
        >>> outlier_ratio(np.array([[1.0, -1.0, 50.0], [-1.0, 1.0, 20.0]]))
        (2, 50.0)
    """
    if values.ndim < 2 or values.shape[-1] < 2:
        return 0, 1.0
    sizes = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0, initial=0.0)
    # Channels that are 0 for all examples, as behind a ReLU, need no steps.
    middle = float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 0.0
    channel = int(sizes.argmax())
    return channel, float(sizes[channel]) / middle if middle else 1.0


def kernels_of(layer: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Returns the weights that int8 rounds, each with its channels; none for most.

    An embedding is looked up, not multiplied: runtimes leave it, or round its rows.
    """
    is_layer = isinstance(layer, keras.layers.Layer)
    if not is_layer or isinstance(layer, keras.layers.Embedding):
        return []
    holders = [each for _, each, _ in structure.walk(layer)]
    if not isinstance(layer, (keras.layers.RNN, keras.layers.TimeDistributed)):
        holders = [layer]
    return [
        (weight, _channels(holder, weight))
        for holder in holders
        for weight in structure.own_weights(holder)
        if keras.backend.is_float_dtype(weight.dtype) and len(weight.shape) >= _MIN_RANK
    ]


def _channels(layer: Any, weight: Any) -> tuple[int, ...]:
    """Returns the dimensions of a kernel that are there in the outputs."""
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, output = layer.equation.split("->")
        letters = inputs.split(",")[1].replace(".", "")
        if len(letters) == len(weight.shape):
            return tuple(i for i, letter in enumerate(letters) if letter in output)
    if isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)):
        return (len(weight.shape) - 2, len(weight.shape) - 1)
    return (len(weight.shape) - 1,)
