"""The optimizers that a model holds, under whatever names.

Relies on: Keras keeping lists, tuples and dictionaries that are a layer's attributes
as what passes for such; `_tracked` being its own list of them.
"""

from collections.abc import Callable
from typing import Any

import keras


def optimizers_of(model: keras.layers.Layer) -> list[Any]:
    """Returns a model's optimizers: attributes, and entries of lists, tuples, dicts.

    Args:
        model: Any model or layer; its sublayers are not searched.

    Returns:
        The optimizers, each once, that of `compile` first where there is one.
    """
    found = [getattr(model, "optimizer", None)]
    for _, value in _attributes(model):
        found += [entry for _, entry in _entries(value)]
    kept = [o for o in found if isinstance(o, keras.optimizers.Optimizer)]
    return list({id(o): o for o in kept}.values())


def replace_optimizers(
    model: keras.layers.Layer, change: Callable[[Any], Any]
) -> list[str]:
    """Puts `change(optimizer)` in the place of each optimizer but that of `compile`.

    One object in several places is replaced by one.

    Returns:
        The names of the attributes that were changed.
    """
    given: dict[int, tuple[Any, Any]] = {}
    # TensorFlow keeps it once more, among what a checkpoint depends on.
    compiled = getattr(model, "optimizer", None)

    def wanted(present: Any) -> Any:
        if present is compiled or not isinstance(present, keras.optimizers.Optimizer):
            return present
        if id(present) not in given:
            given[id(present)] = present, change(present)
        return given[id(present)][1]

    names = []
    for name, value in _attributes(model):
        entries = _entries(value)
        changed = {k: wanted(v) for k, v in entries if wanted(v) is not v}
        if not changed:
            continue
        names.append(name)
        if isinstance(value, keras.optimizers.Optimizer):
            setattr(model, name, changed[None])
        elif isinstance(value, tuple):
            parts = [changed.get(k, v) for k, v in entries]
            make = getattr(type(value), "_make", tuple)  # of named tuples
            setattr(model, name, make(parts))
        else:
            for key, entry in changed.items():
                value[key] = entry
    return names


def _attributes(model: keras.layers.Layer) -> list[tuple[str, Any]]:
    """Returns the attributes that may hold optimizers, but for that of `compile`."""
    own = ("optimizer", "_optimizer", "_tracked")
    return [(name, value) for name, value in vars(model).items() if name not in own]


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns what may be optimizers in an attribute, each with its key."""
    if isinstance(value, keras.optimizers.Optimizer):
        return [(None, value)]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []
