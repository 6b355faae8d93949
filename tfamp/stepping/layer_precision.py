"""Has layers compute in other dtypes for a while, weights and settings untouched."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfamp.dtypes import model_dtypes
from tfamp.dtypes.layer_dtypes import set_policy
from tfamp.dtypes.resolution import count_as_met
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.calls import source_of
from tfamp.keras_hooks.layers import drop_record, record_of, set_record
from tfamp.keras_hooks.patches import like, replaced

_FLOATS = ("float16", "bfloat16", "float32")


@contextlib.contextmanager
def computing_in(layers: Iterable[keras.layers.Layer], dtype: str) -> Iterator[None]:
    """Has layers compute in a dtype, as stock Keras does: without rules of tfamp's.

    Operations of Functional graphs have no dtype; they compute in what they get.
    Layers that compute on integers, in float64, or on quantized weights stay as
    they are.

    Example:
        >>> layer = keras.layers.Dense(2)
        >>> with computing_in([layer], "float16"):
        ...     inside = layer.compute_dtype
        >>> inside, layer.compute_dtype
        ('float16', 'float32')
    """
    name = dtype if dtype == "float32" else f"mixed_{dtype}"
    policy = keras.DTypePolicy(name)
    before = []
    try:
        for layer in layers:
            if not isinstance(layer, keras.layers.Layer) or not _computes(layer):
                continue
            before.append((layer, layer.dtype_policy, record_of(layer)))
            if record_of(layer) is not None:
                count_as_met(layer)  # nobody is to be told that it is not managed
            drop_record(layer)
            set_policy(layer, policy)
        yield
    finally:
        for layer, policy_before, record in reversed(before):
            set_policy(layer, policy_before)
            if record is not None:
                set_record(layer, record)


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Has a whole model compute in float32, without rules, inside the block."""
    layers = [layer for _, layer, _ in structure.walk(model)]
    with computing_in(layers, "float32"):
        yield


@contextlib.contextmanager
def as_islands(layers: Iterable[keras.layers.Layer], dtype: str) -> Iterator[None]:
    """Has layers compute in float32 and return another dtype.

    What one of them hands to another one is not rounded in between, as in a model that
    tfamp manages.
    """
    chosen = list(layers)
    inside = [
        each
        for layer in chosen
        if isinstance(layer, keras.layers.Layer)
        for _, each, _ in structure.walk(layer)
    ]
    with computing_in(inside, "float32"), contextlib.ExitStack() as stack:
        for layer in chosen:
            stack.enter_context(model_dtypes.in_float32(layer, dtype))
        yield


@contextlib.contextmanager
def giving_unrounded(model: keras.Model) -> Iterator[None]:
    """Has a model give what its last layers computed in float32, as heads do."""
    original = model.call

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return structure.map_structure(source_of, original(*args, **kwargs))

    with replaced(model, call=call):
        yield


@contextlib.contextmanager
def adding_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Has layers hand over the losses they add in float32, as in a managed model.

    Keras adds up no losses of several dtypes.
    """

    def widened(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def add_loss(loss: Any) -> Any:
            return original(structure.map_structure(model_dtypes.widened, loss))

        return add_loss

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, add_loss=widened(layer.add_loss)))
        yield


def _computes(layer: keras.layers.Layer) -> bool:
    return layer.quantization_mode is None and layer.compute_dtype in _FLOATS
