"""The layers that an integer export leaves in float: as few as the gate asks for.

One pass over a batch ranks them by how uneven the channels are that they multiply.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes.heads import graph_heads
from tfamp.keras_hooks import structure
from tfamp.serving.exports.writers import NothingRoundedError, Request
from tfamp.stepping.eager_step import Call, Observer, floats, tapped
from tfamp.stepping.layer_calls import units

# Beside a channel so many times as large others have less than three bits of the eight.
_GUILTY = 20.0
_MAX_EXAMPLES = 32  # all that goes through the layers is held at once
_MAX_EVALUATIONS = 3
# A larger head is quantized with the others, as in models of language.
_MAX_HEAD_PART = 0.2
_NAMES = "MultiHeadAttention GroupQueryAttention Attention LayerNormalization"
WITH_ATTENTION = tuple(getattr(keras.layers, name) for name in _NAMES.split())
# These hold their kernels in layers inside them, which runtimes do not tell apart.
_WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)
Written = TypeVar("Written", bound=Any)  # has its `parity`


class Outlier(NamedTuple):
    """A layer, how uneven its inputs are, and the layer with a kernel ahead of it."""

    path: str
    times: float
    ahead: str | None


def layers_kept(model: keras.Model, asked: Iterable[str]) -> dict[str, str]:
    """Returns the layers that every integer export keeps in float32, and why."""
    if isinstance(asked, str):
        told = f"`keep_float32` is {asked!r}, one text; expected paths of layers."
        raise TypeError(f"{told} Pass `[{asked!r}]`.")
    paths = {id(layer): path for path, layer, _ in structure.walk(model)}
    found = {}
    for path in asked:
        if path not in paths.values():
            raise ValueError(
                f"`keep_float32` names {path!r}, which is no layer; paths look like "
                f"{[*paths.values()][-1]!r}. Print `tfamp.assignment(model)`."
            )
        found[path] = "asked for by `keep_float32`"
    if (heads := graph_heads(model)) is not None:
        weights = [weight for layer in heads.heads for weight in layer.weights]
        most = _MAX_HEAD_PART * structure.bytes_of(model.weights)
        small = heads.heads if structure.bytes_of(weights) <= most else ()
        for layer in [*small, *heads.after]:
            why = "a head: its outputs would be rounded to 256 values"
            found.setdefault(paths[id(layer)], why)
    return found


def sparing(
    model: keras.Model,
    inputs: Any,
    request: Request,
    write: Callable[[Request], Written],
) -> Written:
    """Writes an export with as many layers in float as the gate asks for.

    At most three are tried; where none passes, it is the least bad. In "static" what
    goes into a kept layer is rounded by the layer ahead, which stays with it.
    """
    keep: dict[str, str] = {}
    found: list[tuple[float, Written]] = []
    ranking: list[Outlier] = []
    number = 0
    while len(found) < _MAX_EVALUATIONS:
        try:
            asked = dataclasses.replace(request, keep={**request.keep, **keep})
            written = write(asked)
        except NothingRoundedError:
            if not keep:
                raise
            break  # it keeps all that there is to round
        parity = written.parity
        if parity is None:
            return written
        worst = max(parity.metrics, key=lambda each: each.worsening - each.tolerance)
        found.append((worst.worsening, written))
        # An "undecided" for want of examples is no reason to keep layers in float.
        if parity.verdict != "worse" and worst.worsening <= worst.tolerance:
            break
        ranking = ranking or rank(model, inputs)
        number = 2 * number or sum(each.times >= _GUILTY for each in ranking) or 1
        more = {}
        for each in ranking[:number]:
            times = f"{each.times:,.0f}"
            more[each.path] = f"its largest channel is {times} times the middle"
            if request.scheme == "static" and each.ahead is not None:
                more.setdefault(each.ahead, f"its outputs go into {each.path!r}")
        more = {path: why for path, why in more.items() if path not in request.keep}
        if len(more) == len(keep):
            break
        keep = more
    return min(found, key=lambda each: each[0])[1]


class _Channels(Observer):
    """Notes the worst call of each layer, and which layer was called before."""

    def __init__(self) -> None:
        self.worst: dict[str, Outlier] = {}
        self.ahead: str | None = None

    def on_call(self, call: Call) -> None:
        path, times = call.site.path, 1.0
        for x in floats((call.args, call.kwargs)):
            sizes = np.abs(np.asarray(x)).reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
            largest = sizes.max(axis=0, initial=0.0)
            if (largest := largest[largest > 0]).size:
                times = max(times, float(largest.max() / np.median(largest)))
        if path not in self.worst or times > self.worst[path].times:
            self.worst[path] = Outlier(path, times, self.ahead)
        self.ahead = path


def rank(model: keras.Model, inputs: Any) -> list[Outlier]:
    """Ranks the layers of a float32 model by how uneven what they multiply is."""
    found = _Channels()
    chosen = {id(site.layer) for site in units(model) if _has_kernel(site.layer)}
    cut = structure.map_structure
    with tapped(model, found, only=lambda site: id(site.layer) in chosen):
        few = cut(lambda x: tf.convert_to_tensor(x)[:_MAX_EXAMPLES], inputs)
        model(few, training=False)
    return sorted(found.worst.values(), key=lambda each: -each.times)


def _has_kernel(layer: Any) -> bool:
    """States whether int8 rounds what a layer multiplies by.

    An embedding is looked up, not multiplied, and a bias stays in float everywhere.
    """
    if not hasattr(layer, "weights") or isinstance(layer, keras.layers.Embedding):
        return False
    is_whole = isinstance(layer, _WHOLE)
    weights = layer.weights if is_whole else structure.own_weights(layer)
    return any("float" in str(x.dtype) and len(x.shape) > 1 for x in weights)
