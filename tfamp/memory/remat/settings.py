"""What `tfamp.remat` takes: checks of its arguments, and the layers they name."""

from collections.abc import Sequence
from typing import Any

import keras

from tfamp.keras_hooks import structure
from tfamp.records import checks


def check_settings(model: keras.Model | None, only: Any, segments: int | None) -> None:
    """Raises if settings don't go together or lack what they act on."""
    if segments is not None:
        checks.positive_int("segments", segments)
    if only is not None and segments is not None:
        raise ValueError(
            "`only` came with `segments`; expected one of them, as each layer named is "
            "a segment. Leave one out."
        )
    if model is None and (only is not None or segments is not None):
        raise ValueError(
            "`only` or `segments` came with layers; expected them with a model, since "
            "each layer is a segment. Pass the model, or the layers alone."
        )
    if segments is not None and model is not None and structure.graph_of(model) is None:
        raise ValueError(
            f"`segments` came with {model.name!r}, which has no graph to cut; expected "
            "a built Functional or Sequential model. Name layers by `only`."
        )


def check_target(
    model: keras.Model | None,
    max_memory_bytes: int | None,
    batch_size: int | None,
    *,
    enabled: bool,
) -> None:
    """Raises unless a target comes with all that predicting takes."""
    if (max_memory_bytes is None) != (batch_size is None):
        raise ValueError(
            f"`max_memory_bytes` is {max_memory_bytes!r} and `batch_size` "
            f"{batch_size!r}; expected both, as memory grows with the batch, or "
            "neither. Pass the other one too."
        )
    if max_memory_bytes is None:
        return
    checks.positive_int("max_memory_bytes", max_memory_bytes)
    checks.positive_int("batch_size", batch_size)
    if model is None or not model.compiled or not enabled:
        raise ValueError(
            "`max_memory_bytes` came without a compiled model, or with "
            "`enabled=False`; expected a model whose training step can be traced. "
            "Compile the model and pass it whole."
        )


def layers_of(given: Any) -> list[keras.layers.Layer]:
    """Returns one layer or several as a list."""
    layers = [given] if isinstance(given, keras.layers.Layer) else given
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        if layers and all(isinstance(each, keras.layers.Layer) for each in layers):
            return list(layers)
    raise TypeError(
        f"Cannot rematerialise {given!r}; expected a Keras model, a layer, or a list "
        "of layers. Pass what `keras.Model(...)` gave, or `model.layers[1:-1]`."
    )


def chosen_layers(model: keras.Model, only: Any) -> list[keras.layers.Layer]:
    """Returns the layers that names, paths or classes stand for."""
    wanted = [only] if isinstance(only, str | type) else list(only)
    found: dict[int, keras.layers.Layer] = {}
    rows = [row[:2] for row in structure.walk(model) if row[2] is not None]
    for each in wanted:
        matching = [
            layer
            for path, layer in rows
            if (
                isinstance(layer, each)
                if isinstance(each, type)
                else each in (path, layer.name, type(layer).__name__)
            )
        ]
        if not matching:
            raise ValueError(
                f"`only` names {each!r}, and model {model.name!r} has no such layer; "
                f"expected one of {tuple(path for path, _ in rows)}, or a class. Check "
                "the name."
            )
        found |= {id(layer): layer for layer in matching}
    return list(found.values())
