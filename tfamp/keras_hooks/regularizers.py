"""The hook on activity regularizers, which see float32.

Relies on: `Layer.__call__` reading `self.activity_regularizer` while a call context is
open.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfamp.keras_hooks import backend, calls
from tfamp.keras_hooks.layer_record import record_of
from tfamp.keras_hooks.patches import Patch


def patches() -> list[Patch]:
    """Returns the patch on what a layer's regularizer is read from."""
    return [
        Patch(
            keras.layers.Layer,
            "activity_regularizer",
            lambda original: _ActivityRegularizer(),
            optional=True,
        )
    ]


class _InFloat32:
    """A regularizer, called on the float32 value of what it is given."""

    def __init__(self, regularizer: Callable[[Any], Any]) -> None:
        self._regularizer = regularizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._regularizer, name)

    def __call__(self, x: Any) -> Any:
        return self._regularizer(backend.cast(x, "float32"))


class _ActivityRegularizer:
    """`Layer.activity_regularizer`, which sees float32 during a managed call.

    Outside a call the plain object is given, so configs are what they were.
    """

    _name = "activity_regularizer"

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            regularizer = vars(layer)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        if regularizer is None or record_of(layer) is None or not calls.in_call():
            return regularizer
        return _InFloat32(regularizer)

    def __set__(self, layer: Any, value: Any) -> None:
        vars(layer)[self._name] = value

    def __delete__(self, layer: Any) -> None:
        del vars(layer)[self._name]
