"""Hooks where the dtype of a layer is read.

Relies on: `Layer.compute_dtype` and `Layer.dtype_policy` being properties of
`Layer`, through which all readers but `Layer` itself go.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfamp._care import care_of
from tfamp._patch import Patch


def patches(before_read: Callable[[keras.layers.Layer], None]) -> list[Patch]:
    """Returns the patches that let an open question be answered first.

    Args:
        before_read: Called with a managed layer that has not been called yet, and
            whose constructor may not have ended.
    """

    def wrap(original: property) -> property:
        read: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

        def settled(self: keras.layers.Layer) -> Any:
            care = care_of(self)
            if care is not None and not care.settled:
                before_read(self)
            return read(self)

        return property(settled, original.fset, doc=original.__doc__)

    return [
        Patch(keras.layers.Layer, "compute_dtype", wrap),
        Patch(keras.layers.Layer, "dtype_policy", wrap),
    ]
