"""Which parts of a model are looked at one by one: what computes by itself."""

from collections.abc import Sequence
from typing import Any

import keras

from tfamp.keras_hooks import structure
from tfamp.stepping.taps import Site, sites

# What is inside these runs with them: a cell belongs to its layer, and what is wrapped
# runs in the wrapper's dtype.
_WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)


def units(model: keras.Model) -> list[Site]:
    """Returns the layers and operations that compute something themselves.

    Left out are models and Sequentials that only call others, what is inside a
    recurrent or time-distributed layer, and input layers.

    Example:
        >>> x = keras.Input((3,))
        >>> y = keras.Sequential([keras.layers.Dense(3, name="dense")], name="s")(x)
        >>> [site.class_name for site in units(keras.Model(x, y + 1.0))]
        ['Add', 'Dense']
    """
    inside = {
        id(child)
        for site in sites(model)
        if isinstance(site.layer, _WHOLE)
        for _, child, parent in structure.walk(site.layer)
        if parent is not None
    }
    return [
        site
        for site in sites(model)
        if id(site.layer) not in inside and computes_itself(site)
    ]


def computes_itself(site: Site) -> bool:
    """States whether a layer has a call of its own, rather than a graph of others."""
    if not isinstance(site.layer, keras.layers.Layer):
        return True
    return not isinstance(site.layer, keras.layers.InputLayer) and (
        not structure.only_calls_others(site.layer)
    )


def how_to_keep(found: Sequence[Site]) -> str:
    """Returns what keeps layers and operations in float32, as a sentence for people.

    Example:
        >>> x = keras.Input((3,))
        >>> dense = keras.layers.Dense(3, name="dense")
        >>> model = keras.Model(x, dense(x))
        >>> how_to_keep([Site("dense", dense)])
        "Keep them in float32: `keep_float32=['dense']`."
    """
    layers = [s for s in found if isinstance(s.layer, keras.layers.Layer)]
    operations = [s for s in found if not isinstance(s.layer, keras.layers.Layer)]
    sentences = []
    if layers:
        paths = ", ".join(repr(site.path) for site in layers)
        sentences.append(f"Keep them in float32: `keep_float32=[{paths}]`.")
    if operations:
        paths = ", ".join(repr(site.path) for site in operations)
        sentences.append(
            f"Operations of a Functional graph have no dtype: put {paths} into a layer "
            "of your own and make that with `dtype='float32'`."
        )
    return " ".join(sentences)


def runs_whole(layer: Any) -> bool:
    """States whether what is inside a layer is lowered together with it."""
    return isinstance(layer, _WHOLE) or not _children(layer)


def watched_sites(model: keras.Model, chosen: Sequence[Site]) -> set[int]:
    """Returns the ids of the layers to record: the units and what they call."""
    found = {id(site.layer) for site in chosen}
    for site in chosen:
        if not runs_whole(site.layer):
            found |= {id(child) for child in _children(site.layer)}
    return found


def _children(layer: Any) -> list[Any]:
    is_layer = isinstance(layer, keras.layers.Layer)
    return structure.children(layer) if is_layer else []
