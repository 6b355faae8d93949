"""What counts of Keras layers and of TensorFlow's lookup tables: all their state."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.fingerprints.classes import attributes, configuration
from tfamp.data.fingerprints.packages import is_installed
from tfamp.data.fingerprints.walk import Parts, Unordered, Unseen

_EXPORTED = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable)
TABLES = (
    *_EXPORTED,
    tf.lookup.StaticVocabularyTable,
    tf.lookup.experimental.DenseHashTable,
)
VARIABLES = (tf.Variable, keras.Variable)
_STATE = (*VARIABLES, *TABLES, keras.layers.Layer, np.ndarray, tf.Tensor)


def layer_parts(layer: keras.layers.Layer) -> Parts:
    """Yields a layer's class, configuration, weights and whatever else it holds."""
    yield "layer"
    yield type(layer)
    yield _without_numbers(configuration(layer))
    yield [np.asarray(weight) for weight in layer.weights]
    own = {
        name: value
        for name, value in attributes(layer).items()
        if name not in _kept_by_keras(isinstance(layer, keras.Model))
    }
    own["layers"] = list(getattr(layer, "layers", ()))
    if is_installed(type(layer).__module__):
        # Its configuration says the rest.
        own = {name: list(_state(value)) for name, value in own.items()}
    yield {name: value for name, value in own.items() if not _is_empty(value)}


def table_parts(table: Any) -> Parts:
    """Yields what a lookup table holds."""
    yield "table"
    yield type(table)
    if isinstance(table, tf.lookup.StaticVocabularyTable):
        for name in ("_table", "_num_oov_buckets", "_hasher_spec"):
            yield getattr(table, name, None)
        return
    if not isinstance(table, _EXPORTED):
        yield Unseen(f"a {type(table).__name__}")
        return
    try:
        keys, values = (part.numpy() for part in table.export())
    except (tf.errors.OpError, AttributeError):
        yield Unseen(f"a {type(table).__name__} that is not ready")
        return
    yield getattr(table, "_default_value", None)
    yield pairs(keys, values)


def pairs(keys: np.ndarray, values: np.ndarray) -> Any:
    """Returns what a table maps to what, in no order: TensorFlow's changes."""
    if keys.ndim != 1:
        return Unordered(list(zip(keys, values, strict=True)))
    order = np.argsort(keys, kind="stable")
    return keys[order], values[order]


@functools.cache
def _kept_by_keras(is_model: bool) -> frozenset[str]:
    """Returns the attributes that any layer has, which Keras keeps books in."""
    kind = keras.Model if is_model else keras.layers.Layer
    return frozenset({*vars(kind(name="fingerprint")), "built", "_name"})


def _state(value: Any) -> Iterator[Any]:
    """Yields the layers, tables and arrays in an attribute."""
    if isinstance(value, _STATE):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _state(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _state(one)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and not value


def _without_numbers(config: Any) -> Any:
    """Returns a configuration whose names do not count layers, as Keras's do."""
    places: dict[str, str] = {}
    for name in _values_of_names(config):
        places.setdefault(name, f"layer {len(places)}")
    return _renamed(config, places)


def _values_of_names(config: Any) -> Iterable[str]:
    """Yields the names of layers in a configuration, in its own order."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "name" and isinstance(value, str) and "trainable" in config:
                yield value
            else:
                yield from _values_of_names(value)
    elif isinstance(config, (list, tuple)):
        for value in config:
            yield from _values_of_names(value)


def _renamed(config: Any, places: Mapping[str, str]) -> Any:
    if isinstance(config, str):
        return places.get(config, config)
    if isinstance(config, Mapping):
        return {key: _renamed(value, places) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [_renamed(value, places) for value in config]
    return config
