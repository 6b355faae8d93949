"""The layers that an integer export leaves in float: as few as the gate asks for.

Most models need none. Else one pass over a batch ranks the layers by how uneven the
channels are that they multiply, and exports that keep the first of them are tried.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes.heads import graph_heads
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import Patch, like
from tfamp.serving.exports.writers import NothingRoundedError
from tfamp.serving.gate import Parity

# A channel this many times as large as the one in the middle leaves the others less
# than three bits of the eight.
_GUILTY = 20.0
# Examples of the pass: all that went through the layers is held at once.
_MAX_EXAMPLES = 32
_MAX_EVALUATIONS = 3
# A head of a larger part of the weights is quantized with the others, as it is in
# models of language, whose head has a row for each word.
_MAX_HEAD_PART = 0.2
_WITH_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.LayerNormalization,
)
# These hold their kernels in layers inside them, which runtimes do not tell apart.
_WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)


class Outlier(NamedTuple):
    """A layer, how uneven its inputs are, and the layer with a kernel ahead of it."""

    path: str
    times: float
    ahead: str | None


def layers_kept(model: keras.Model, asked: Iterable[str]) -> dict[str, str]:
    """Returns the layers that every integer export keeps in float32, and why."""
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
    # Where all is head, as in a model of one layer, there is nothing else to quantize.
    for layer in [*(heads.heads if small else ()), *heads.after]:
        why = "a head: its outputs would be rounded to 256 values"
        found.setdefault(paths[id(layer)], why)
    return found


def has_attention(model: keras.Model) -> bool:
    """States whether a model normalizes over features, as transformers do."""
    layers = (layer for _, layer, _ in structure.walk(model))
    return any(isinstance(layer, _WITH_ATTENTION) for layer in layers)


def spoilt(
    model: keras.Model,
    inputs: Any,
    evaluate: Callable[[dict[str, str]], Parity],
    *,
    scheme: str,
    fixed: Collection[str] = (),
) -> dict[str, str]:
    """Returns the layers that have to stay in float for an int8 export to pass, why.

    `evaluate` exports with such layers and compares. At most three exports are tried;
    where none passes, the layers are those of the one that was least worse. In "static"
    what goes into a kept layer is rounded by the layer ahead of it, so that stays in
    float with it. `fixed` ones stay in any case.
    """
    keep: dict[str, str] = {}
    found: list[tuple[float, dict[str, str]]] = []
    ranking: tuple[Outlier, ...] = ()
    number = 0
    while len(found) < _MAX_EVALUATIONS:
        try:
            parity = evaluate(keep)
        except NothingRoundedError:
            if not keep:
                raise
            break  # it keeps all that there is to round
        worst = max(parity.metrics, key=lambda each: each.worsening - each.tolerance)
        found.append((worst.worsening, keep))
        # An "undecided" for want of examples is no reason to keep layers in float.
        if parity.verdict != "worse" and worst.worsening <= worst.tolerance:
            break
        ranking = ranking or rank(model, inputs)
        number = 2 * number or sum(each.times >= _GUILTY for each in ranking) or 1
        more = {}
        for each in ranking[:number]:
            times = f"{each.times:,.0f}"
            more[each.path] = f"its largest channel is {times} times the middle"
            if scheme == "static" and each.ahead is not None:
                more.setdefault(each.ahead, f"its outputs go into {each.path!r}")
        more = {path: why for path, why in more.items() if path not in fixed}
        if len(more) == len(keep):
            break
        keep = more
    return min(found, key=lambda each: each[0])[1]


def rank(model: keras.Model, inputs: Any) -> tuple[Outlier, ...]:
    """Ranks the layers of a float32 model by how uneven what they multiply is."""
    calls: list[tuple[Any, Any]] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = original(layer, *args, **kwargs)
            calls.append((layer, (args, kwargs)))
            return outputs

        return __call__

    patch = Patch(keras.layers.Layer, "__call__", wrap)
    patch.install()
    try:
        first = structure.map_structure(
            lambda x: tf.convert_to_tensor(x)[:_MAX_EXAMPLES], inputs
        )
        model(first, training=False)
    finally:
        patch.remove()
    paths = {id(layer): path for path, layer, _ in structure.walk(model)}
    for layer in [layer for layer, _ in calls if isinstance(layer, _WHOLE)]:
        for _, inside, _ in list(structure.walk(layer))[1:]:
            paths.pop(id(inside), None)
    worst: dict[str, Outlier] = {}
    ahead: str | None = None
    for layer, given in calls:
        path = paths.get(id(layer))
        if path is None or not _has_kernel(layer):
            continue
        leaves = [x for x in tf.nest.flatten(given) if tf.is_tensor(x)]
        floats = [x for x in leaves if x.dtype.is_floating]
        times = max(map(_largest_over_middle, floats), default=1.0)
        if path not in worst or times > worst[path].times:
            worst[path] = Outlier(path, times, ahead)
        ahead = path
    return tuple(sorted(worst.values(), key=lambda each: -each.times))


def _largest_over_middle(x: Any) -> float:
    """Returns how many times the middle one of the last dimension the largest is."""
    sizes = np.abs(np.asarray(x)).reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    largest = sizes.max(axis=0)
    found = largest[largest > 0]
    return float(found.max() / np.median(found)) if found.size else 1.0


def _has_kernel(layer: Any) -> bool:
    """States whether int8 rounds what a layer multiplies by.

    An embedding is looked up, not multiplied: runtimes leave it, or round its rows.
    What has one dimension, such as a bias, stays in float in every runtime.
    """
    if isinstance(layer, keras.layers.Embedding):
        return False
    is_whole = isinstance(layer, _WHOLE)
    weights = layer.weights if is_whole else structure.own_weights(layer)
    return any(
        keras.backend.is_float_dtype(each.dtype) and len(each.shape) > 1
        for each in weights
    )
