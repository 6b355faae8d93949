"""Shows what `compile` would decide about a model, without deciding it."""

import contextlib
from collections.abc import Iterator

import keras

from tfamp._care import care_of
from tfamp.keras_hooks import structure
from tfamp.managed import heads, resolving


@contextlib.contextmanager
def previewed(model: keras.layers.Layer) -> Iterator[None]:
    """Shows inside the block what `compile` would make of a graph of layers.

    Which layers are heads is decided when the model is compiled or used; until then
    it may yet become a part of another model.
    """
    care = care_of(model)
    if structure.graph_of(model) is None or care is None:
        yield
        return
    if care.resolved:
        resolving.resolve(model)  # a Sequential may have grown since
        yield
        return
    before = heads.held(layer for _, layer, _ in structure.walk(model))
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        resolving.resolve(model)
        yield
    finally:
        heads.restore(before)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)
