"""The dtypes of all layers of a model, to be put back after they were changed."""

import contextlib
from collections.abc import Iterator

import keras

from tfamp.dtypes import graph_operations, heads, layer_dtypes
from tfamp.keras_hooks import structure


@contextlib.contextmanager
def restored(model: keras.layers.Layer) -> Iterator[None]:
    """Puts a model's layers, operations and graph back, however the block ends."""
    before = layer_dtypes.read(layer for _, layer, _ in structure.walk(model))
    operations = [
        (operation, graph_operations.kept(operation))
        for _, operation in graph_operations.of_model(model)
    ]
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        yield
    finally:
        layer_dtypes.restore(before)
        for operation, kept in operations:
            graph_operations.release(operation)
            if kept is not None:
                graph_operations.keep(operation, *kept)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)
