"""What a whole model computes in: operations of its graphs, and all of it put back.

Operations of Functional graphs have no dtype of their own, and can be kept in float32.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.dtypes import heads, layer_dtypes
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.calls import cast_outputs
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.keras_hooks.patches import like, replaced
from tfamp.records.formats import HALF

_KEPT = "_tfamp_kept_in_float32"


class Float32Operation(NamedTuple):
    """How an operation is kept in float32."""

    output_dtype: str  # what its floating-point outputs are cast to
    rule: str = ""  # what decided
    reason: str = ""  # why


def of_model(model: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields path and operation of all graphs in a model, each once, in their order."""
    seen: set[int] = set()
    for path, layer, _ in structure.walk(model):
        prefix = "" if layer is model else f"{path}/"
        for operation in structure.operations_of(layer):
            if id(operation) not in seen:
                seen.add(id(operation))
                yield f"{prefix}{operation.name}", operation


def kept(operation: Any) -> Float32Operation | None:
    """Returns how an operation is kept in float32, None where it is not."""
    found = vars(operation).get(_KEPT)
    return None if found is None else found[1]


def keep(operation: Any, output_dtype: str, rule: str = "", reason: str = "") -> bool:
    """Has an operation compute in float32 from now on.

    It has no dtype to be set, so its call is replaced on the instance; Keras's own part
    of a file that the model is saved to knows nothing of that. Its floating-point
    outputs are cast to `output_dtype`. Returns whether it did not do so already.
    """
    if _KEPT in vars(operation):
        return False
    # Let go of, the stack would put the call back.
    stack = contextlib.ExitStack()
    vars(operation)[_KEPT] = stack, Float32Operation(output_dtype, rule, reason)
    stack.enter_context(in_float32(operation, output_dtype))
    return True


def release(operation: Any) -> None:
    """Has an operation compute again in what it gets; nothing where it does."""
    found = vars(operation).pop(_KEPT, None)
    if found is not None:
        found[0].close()


def kept_in(model: keras.layers.Layer) -> dict[int, Float32Operation]:
    """Returns the operations that are kept in float32, by their place in `of_model`."""
    found = {place: kept(each) for place, (_, each) in enumerate(of_model(model))}
    return {place: each for place, each in found.items() if each is not None}


def keep_only(
    model: keras.layers.Layer, wanted: Mapping[int, Float32Operation]
) -> None:
    """Keeps these operations in float32, by their place, and no others."""
    for place, (_, operation) in enumerate(of_model(model)):
        release(operation)
        if place in wanted:
            keep(operation, *wanted[place])


@contextlib.contextmanager
def restored(model: keras.layers.Layer) -> Iterator[None]:
    """Puts a model's layers, operations and graph back, however the block ends."""
    before = layer_dtypes.Before(layer for _, layer, _ in structure.walk(model))
    operations = kept_in(model)
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    try:
        yield
    finally:
        before.put_back()
        keep_only(model, operations)
        for tensor, dtype in tensors:
            structure.set_tensor_dtype(tensor, dtype)


@contextlib.contextmanager
def in_float32(layer: Any, dtype: str) -> Iterator[None]:
    """Has a float32 layer or an operation take inputs as exact as they are known.

    Its floating-point outputs are cast to `dtype`.
    """
    original = layer.call

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = structure.map_structure(widened, (args, kwargs))
        return cast_outputs(original(*args, **kwargs), dtype)

    # Without autocasting the layer is given the very tensors that others returned,
    # which know what they were rounded from. Operations have no such setting.
    uncast = {"autocast": False} if "autocast" in vars(layer) else {}
    with replaced(layer, call=call, **uncast):
        yield


def widened(x: Any) -> Any:
    """Returns a half-precision tensor in float32, unrounded where that is known."""
    if isinstance(x, tf.Tensor) and x.dtype.name in HALF:
        return unrounded(x)
    return x
