"""The layers that an integer export leaves in float: as few as the gate asks for.

One pass over a batch ranks them. Each layer with a kernel runs again on what it got in
float32, its inputs and weights rounded as int8 rounds them; what comes out is compared
with what it gave, relative to how much that differs over the batch. Then exports that
keep the first of the ranking are tried.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes.heads import graph_heads
from tfamp.keras_hooks import structure
from tfamp.machine.cpus import instruction_sets
from tfamp.numerics.sensitivity.errors import forward_error
from tfamp.records.record import Record
from tfamp.serving.exports.request import NothingRoundedError
from tfamp.serving.parity import Parity
from tfamp.stepping.eager_step import Call, Observer, floats, is_float, tapped
from tfamp.stepping.layer_calls import units

# An error of outputs from which a layer is expected to break a metric.
_GUILTY = 0.1
# A channel this many times as large as the one in the middle leaves the others less
# than three bits of the eight.
_OUTLIER = 20.0
_WEIGHT_STEPS, _ACTIVATION_STEPS = 127, 255
# What has fewer dimensions, such as a bias, stays in float in every runtime.
_MIN_RANK = 2
# Examples of the pass: all that went through the layers is held at once.
_MAX_EXAMPLES = 32
_MAX_EVALUATIONS = 3
# A head of a larger part of the weights is quantised with the others, as it is in
# models of language, whose head has a row for each word.
_MAX_HEAD_PART = 0.2
_WITH_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.LayerNormalization,
)
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
        error: Of its outputs with inputs and weights rounded, relative to their spread
            over the batch; the worst of its calls.
        producers: Layers with a kernel that its outlier channel comes from.
        reason: What spoils it, with the figures; "" where nothing does.
    """

    path: str
    error: float
    producers: tuple[str, ...] = ()
    reason: str = ""

    @property
    def is_guilty(self) -> bool:
        """Whether it is expected to break a metric."""
        return not self.error < _GUILTY


@dataclasses.dataclass(frozen=True)
class Evaluation(Record):
    """An export that was tried: what it kept, how much worse it was, if it passed."""

    layers: tuple[str, ...]
    worsening: float
    passes: bool


@dataclasses.dataclass(frozen=True)
class Kept(Record):
    """What the search for layers that int8 spoils came to.

    Args:
        layers: Layers that stay in float, each with the reason.
        ranking: What each layer came to alone, the most spoilt first.
        evaluations: The exports that were tried, in order.
        holds: Whether one passed; where none did, the layers are those of the attempt
            that was least worse.
        seconds: For ranking and evaluations.
    """

    layers: dict[str, str]
    ranking: tuple[LayerError, ...]
    evaluations: tuple[Evaluation, ...]
    holds: bool
    seconds: float


def layers_kept(model: keras.Model, asked: Iterable[str]) -> dict[str, str]:
    """Returns the layers that every integer export keeps in float32, and why.

    These are heads, and those whose paths the user has `asked` for.
    """
    if isinstance(asked, str):
        raise TypeError(
            f"`keep_float32` is {asked!r}, one text; expected paths of layers. Pass "
            f"`[{asked!r}]`."
        )
    paths = {id(layer): path for path, layer, _ in structure.walk(model)}
    found = {}
    for path in asked:
        if path not in paths.values():
            raise ValueError(
                f"`keep_float32` names {path!r}, which is none of the layers; paths "
                f"look like {list(paths.values())[-1]!r}. Print them with "
                "`tfamp.assignment(model)`."
            )
        found[path] = "asked for by `keep_float32`"
    heads = graph_heads(model)
    if heads is None:
        return found
    weights = [weight for layer in heads.heads for weight in layer.weights]
    most = _MAX_HEAD_PART * structure.bytes_of(model.weights)
    small = structure.bytes_of(weights) <= most
    # Where all is head, as in a model of one layer, there is nothing else to quantise.
    for layer in [*(heads.heads if small else ()), *heads.after]:
        why = "a head: its outputs would be rounded to 256 values"
        found.setdefault(paths[id(layer)], why)
    return found


def convolutions(model: keras.Model) -> dict[str, str]:
    """Returns the convolutions of a model, and why ONNX's dynamic scheme keeps them."""
    why = "a convolution: ONNX Runtime's dynamic ones are slower than float32"
    return {
        path: why
        for path, layer, _ in structure.walk(model)
        if "Conv" in type(layer).__name__ and layer.weights
    }


def has_attention(model: keras.Model) -> bool:
    """States whether a model normalises over features, as transformers do."""
    layers = (layer for _, layer, _ in structure.walk(model))
    return any(isinstance(layer, _WITH_ATTENTION) for layer in layers)


def reduces_range(flags: Iterable[str] | None = None) -> bool:
    """States whether int8 products of this processor need weights of 7 bits.

    x86 without VNNI adds pairs of 8-bit products in 16 bits, which cuts sums off.

    Example:
        >>> reduces_range(["avx2"]), reduces_range(["avx512_vnni"]), reduces_range([])
        (True, False, False)
    """
    found = set(instruction_sets() if flags is None else flags)
    is_x86 = any(flag.startswith(("avx", "sse")) for flag in found)
    return is_x86 and not {"avx512_vnni", "avx_vnni", "amx_int8"} & found


def keep_guilty(
    model: keras.Model,
    inputs: Any,
    evaluate: Callable[[tuple[str, ...]], Parity],
    *,
    scheme: str,
    fixed: Collection[str] = (),
) -> Kept:
    """Finds the layers that have to stay in float for an int8 export to pass.

    Exports that keep the first of the ranking are tried until one passes, and fewer
    then. Most models need none: where the ranking finds nobody guilty, int8 everywhere
    is tried first.

    Args:
        model: The float32 model.
        inputs: A batch as the model takes it.
        evaluate: Exports with these layers in float, by path, and compares.
        scheme: As for `rank`. In "static" a kept layer's outlier is rounded by the
            layer that gives it, so that stays in float with it.
        fixed: Layers that stay in float in any case, such as heads; `evaluate` is not
            told of them.
    """
    began = time.perf_counter()
    ranking = rank(model, inputs, scheme=scheme)
    by_path = {layer.path: layer for layer in ranking}
    tried: list[Evaluation] = []

    def with_producers(paths: Iterable[str]) -> tuple[str, ...]:
        found = list(paths)
        if scheme == "static":
            found += [each for path in found for each in by_path[path].producers]
        return tuple(path for path in dict.fromkeys(found) if path not in fixed)

    def attempt(layers: tuple[str, ...]) -> bool:
        """Tries an export; one that rounds nothing keeps more than it needs to."""
        try:
            parity = evaluate(layers)
        except NothingRoundedError:
            if not layers:
                raise
            tried.append(Evaluation(layers, math.inf, False))
            return True
        worst = max(parity.metrics, key=lambda each: each.worsening - each.tolerance)
        # An "undecided" for want of examples is no reason to keep layers in float.
        passes = worst.worsening <= worst.tolerance and parity.verdict != "worse"
        tried.append(Evaluation(layers, worst.worsening, passes))
        return passes

    # What stays anyway may need the layer that gives its outlier to stay, too.
    free = [layer.path for layer in ranking if with_producers([layer.path])]
    number = sum(by_path[path].is_guilty for path in free)
    low, high = -1, len(free) + 1
    while low < number < high and len(tried) < _MAX_EVALUATIONS:
        if attempt(with_producers(free[:number])):
            high = number
        else:
            low = number
        number = (low + high) // 2
        if high > len(free):  # none has passed yet
            number = min(max(2 * low, low + 1), len(free))
    if all(math.isinf(each.worsening) for each in tried):
        attempt(())
    passed = [each for each in tried if each.passes]
    chosen = min(passed, key=lambda each: len(each.layers), default=None)
    chosen = chosen or min(tried, key=lambda each: each.worsening)
    takers = {p: layer.path for layer in ranking for p in layer.producers}
    reasons = {}
    for path in chosen.layers:
        why = by_path[path].reason if path in by_path else ""
        if not why and path in takers:
            why = f"it gives the outlier channel of {takers[path]!r}"
        reasons[path] = why or "the gate needs it, as the next in the ranking"
    seconds = time.perf_counter() - began
    return Kept(reasons, ranking, tuple(tried), bool(passed), seconds)


def rank(
    model: keras.Model, inputs: Any, *, scheme: str = "dynamic"
) -> tuple[LayerError, ...]:
    """Ranks the layers of a float32 model by what int8 does to each of them alone.

    The first 32 of the inputs go through it; it is as it was afterwards. "weights"
    rounds kernels only, "dynamic" and "static" what they are multiplied with, too.

    Example:
        >>> keras.utils.set_random_seed(0)
        >>> dense = keras.layers.Dense(4, name="logits")
        >>> model = keras.Sequential([keras.Input((8,)), dense])
        >>> found = rank(model, np.random.default_rng(0).normal(size=(16, 8)))
        >>> found[0].path, found[0].is_guilty
        ('logits', False)
    """
    recorder = _Recorder(model)
    given = structure.map_structure(
        lambda x: tf.convert_to_tensor(x)[:_MAX_EXAMPLES], inputs
    )
    with tapped(model, recorder, only=lambda site: id(site.layer) in recorder.watched):
        model(given, training=False)
    worst: dict[str, LayerError] = {}
    for call, outputs in recorder.calls:
        if not _kernels_of(call.site.layer):
            continue
        found = _error_of(call, outputs, recorder, rounds_inputs=scheme != "weights")
        if found.path not in worst or found.error > worst[found.path].error:
            worst[found.path] = found
    return tuple(sorted(worst.values(), key=lambda each: -each.error))


class _Recorder(Observer):
    """Keeps what goes into layers, and who made it."""

    def __init__(self, model: keras.Model) -> None:
        self.watched = {id(site.layer) for site in units(model)}
        self.calls: list[tuple[Call, Any]] = []
        self._makers: dict[int, Call] = {}

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Keeps the outputs, whose maker is the innermost layer that returned them."""
        self.calls.append((call, outputs))
        given = {id(each) for each in floats((call.args, call.kwargs))}
        for each in floats(outputs):
            if id(each) not in given:  # a Dropout hands on what it gets
                self._makers.setdefault(id(each), call)

    def producers_of(self, tensor: Any) -> tuple[str, ...]:
        """Returns the layers with kernels that an outlier channel comes from."""
        found: list[str] = []
        seen: set[int] = set()
        open_ones = [tensor]
        while open_ones:
            maker = self._makers.get(id(open_ones.pop()))
            if maker is None or id(maker) in seen:
                continue
            seen.add(id(maker))
            if _kernels_of(maker.site.layer):
                found.append(maker.site.path)
            elif not isinstance(maker.site.layer, _RESCALING):
                sources = floats((maker.args, maker.kwargs))
                with_outlier = [x for x in sources if _outlier(x)[1] >= _OUTLIER]
                # A batch normalization may make the outlier: it is folded away.
                open_ones += with_outlier or sources[:1]
        return tuple(found)


def _error_of(
    call: Call, outputs: Any, recorder: _Recorder, *, rounds_inputs: bool
) -> LayerError:
    layer, args, kwargs = call.site.layer, call.args, call.kwargs

    def off() -> float:
        low = layer.call(*args, **kwargs)
        pairs = zip(floats(low), floats(outputs), strict=True)
        errors = (forward_error(np.asarray(a), np.asarray(b)) for a, b in pairs)
        return max(errors, default=0.0)

    found = [(x, *_outlier(x)) for x in floats((args, kwargs))]
    with _rounded(layer):
        error = by_weights = off()
        if rounds_inputs:
            args, kwargs = structure.map_structure(_rounded_tensor, (args, kwargs))
            error = off()
    x, channel, ratio = max(found, key=lambda each: each[2], default=(None, 0, 1.0))
    told = f"its outputs are off by {error:.2g} times their spread"
    if ratio >= _OUTLIER:
        text = f"channel {channel} of its inputs is {ratio:,.0f} times the "
        told = f"an outlier channel: {text}middle one, and {told}"
    elif by_weights >= error / 2:
        told = f"its weights: {told}, by {by_weights:.2g} with rounded weights"
    else:
        told = f"its activations: {told}"
    producers = recorder.producers_of(x) if ratio >= _OUTLIER else ()
    is_guilty = not error < _GUILTY
    return LayerError(call.site.path, error, producers, told if is_guilty else "")


@contextlib.contextmanager
def _rounded(layer: Any) -> Iterator[None]:
    """Rounds the kernels of a layer inside the block."""
    kernels = _kernels_of(layer)
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
    low, high = float(values.min(initial=0.0)), float(values.max(initial=0.0))
    scale = (high - low) / _ACTIVATION_STEPS
    if not (scale > 0 and np.isfinite(scale)):
        return values
    zero = np.round(-low / scale)
    steps = np.clip(np.round(values / scale) + zero, 0, _ACTIVATION_STEPS)
    return ((steps - zero) * scale).astype(values.dtype)


def _outlier(x: Any) -> tuple[int, float]:
    """Returns the largest channel of activations, and how many times the middle it is.

    Channels that are 0 for all examples, as behind a ReLU, need no steps.
    """
    values = np.asarray(x)
    if values.ndim < 2 or values.shape[-1] < 2:
        return 0, 1.0
    sizes = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0, initial=0.0)
    middle = float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 0.0
    channel = int(sizes.argmax())
    return channel, float(sizes[channel]) / middle if middle else 1.0


def _kernels_of(layer: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Returns the weights that int8 rounds, each with its channels; none for most.

    An embedding is looked up, not multiplied: runtimes leave it, or round its rows.
    """
    is_layer = isinstance(layer, keras.layers.Layer)
    if not is_layer or isinstance(layer, keras.layers.Embedding):
        return []
    holders = [layer]
    if isinstance(layer, (keras.layers.RNN, keras.layers.TimeDistributed)):
        holders = [each for _, each, _ in structure.walk(layer)]
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
