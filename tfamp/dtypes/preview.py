"""Shows what `compile` would decide about a model, without deciding it."""

import contextlib
from collections.abc import Iterator

import keras

from tfamp.dtypes import heads, resolution
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import record_of


@contextlib.contextmanager
def previewed(model: keras.layers.Layer) -> Iterator[None]:
    """Shows inside the block what `compile` would make of a graph of layers.

    Which layers are heads is decided when the model is compiled or used; until then
    it may yet become a part of another model.
    """
    record = record_of(model)
    if structure.graph_of(model) is None or record is None:
        yield
        return
    if record.is_resolved:
        resolution.resolve(model)  # a Sequential may have grown since
        yield
        return
    before = heads.held(layer for _, layer, _ in structure.walk(model))
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        resolution.resolve(model)
        yield
    finally:
        heads.restore(before)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)
