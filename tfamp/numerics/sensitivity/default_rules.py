"""Has a model compute as it would under `tfamp.enable`, and tells what that keeps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfamp.dtypes import heads, hooks, layer_dtypes, resolution
from tfamp.dtypes.settings import make_settings
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import Kind, drop_record, record_of
from tfamp.stepping.taps import Site


def given_dtypes(model: keras.Model) -> dict[int, keras.DTypePolicy]:
    """Returns the policies of layers that a user made with a `dtype`, by id."""
    return {
        id(layer): layer.dtype_policy
        for _, layer, _ in structure.walk(model)
        if (record := record_of(layer)) is not None and record.kind is Kind.EXPLICIT
    }


@contextlib.contextmanager
def under_default_rules(
    model: keras.Model, dtype: str, given: dict[int, keras.DTypePolicy]
) -> Iterator[None]:
    """Has a model that is not managed compute in a dtype as tfamp has it by default.

    Args:
        model: A built model of which no layer is managed now.
        dtype: "float16" or "bfloat16".
        given: What `given_dtypes` found before.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    policies = [layer.dtype_policy for layer in layers]
    found = heads.graph_heads(model)
    tensors = [(t, t.dtype) for t in (found.tensors if found is not None else ())]
    settings = make_settings(f"mixed_{dtype}")
    hooks.hold(settings)
    try:
        for layer in layers:
            if id(layer) in given:
                layer_dtypes.set_policy(layer, given[id(layer)])
                layer_dtypes.begin(layer, settings, is_explicit=True)
            else:
                layer_dtypes.begin_again(layer, settings)
        for layer in layers:
            layer_dtypes.settle(layer)
        resolution.resolve(model)
        yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            drop_record(layer)
            layer_dtypes.set_policy(layer, policy)
        for tensor, own in tensors:
            structure.set_tensor_dtype(tensor, own)


def rules_of(model: keras.Model, sites: list[Site]) -> dict[str, str]:
    """Returns what keeps layers and operations in float32 by path, where anything does.

    Args:
        model: A model that has been called inside `under_default_rules`.
        sites: What is asked for.
    """
    wide = _wide_operations(model)
    found = {}
    for site in sites:
        record = (
            record_of(site.layer)
            if isinstance(site.layer, keras.layers.Layer)
            else None
        )
        is_float32 = record is not None and site.layer.compute_dtype == "float32"
        if record is not None and (record.is_kept or is_float32):
            is_given = record.kind is Kind.EXPLICIT
            found[site.path] = "its own dtype" if is_given else record.rule
        elif id(site.layer) in wide:
            found[site.path] = "default: heads"
    return found


def _wide_operations(model: keras.Model) -> set[int]:
    """Returns the ids of the operations of a graph between a head and an output."""
    found = heads.graph_heads(model)
    made: list[Any] = [
        structure.producer(tensor)
        for tensor in (found.tensors if found is not None else ())
        if tensor.dtype == "float32"
    ]
    return {
        id(each[0])
        for each in made
        if each is not None and not isinstance(each[0], keras.layers.Layer)
    }
