"""Which layers stay in float32 in an integer export, and what else depends on them."""

from collections.abc import Iterable, Mapping

import keras

from tfamp.dtypes.heads import graph_heads
from tfamp.keras_hooks import structure
from tfamp.machine.cpus import instruction_sets

# A head of a larger part of the weights is quantised with the others, as it is in
# models of language, whose head has a row for each word.
MAX_HEAD_PART = 0.2
_WITH_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.LayerNormalization,
)
_HEAD = "a head: its outputs would be rounded to 256 values"
_ASKED = "asked for by `keep_float32`"


def kept_layers(model: keras.Model, asked: Iterable[str]) -> dict[str, str]:
    """Returns the layers that an integer export keeps in float32, and why.

    Args:
        model: The model, as a graph or subclassed.
        asked: Paths of layers that the user wants kept.

    Raises:
        ValueError: A path is that of no layer.
    """
    paths = {id(layer): path for path, layer, _ in structure.walk(model)}
    found = {}
    for path in asked:
        if path not in paths.values():
            raise ValueError(
                f"`keep_float32` names {path!r}, which is none of the layers; paths "
                f"look like {list(paths.values())[-1]!r}. Print them with "
                "`tfamp.assignment(model)`."
            )
        found[path] = _ASKED
    total = structure.bytes_of(model.weights)
    heads = graph_heads(model)
    if heads is None:
        return found
    weights = [weight for layer in heads.heads for weight in layer.weights]
    small = structure.bytes_of(weights) <= MAX_HEAD_PART * total
    # Where all is head, as in a model of one layer, there is nothing else to quantise.
    for layer in [*(heads.heads if small else ()), *heads.after]:
        found.setdefault(paths[id(layer)], _HEAD)
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
    return any(
        isinstance(layer, _WITH_ATTENTION) for _, layer, _ in structure.walk(model)
    )


def reduces_range(flags: Mapping[str, object] | Iterable[str] | None = None) -> bool:
    """States whether int8 products of this processor need weights of 7 bits.

    x86 without VNNI adds pairs of 8-bit products in 16 bits, which cuts sums off.

    Example:
        >>> reduces_range(["avx2"]), reduces_range(["avx512_vnni"]), reduces_range([])
        (True, False, False)
    """
    found = set(instruction_sets() if flags is None else flags)
    is_x86 = any(flag.startswith(("avx", "sse")) for flag in found)
    return is_x86 and not {"avx512_vnni", "avx_vnni", "amx_int8"} & found
