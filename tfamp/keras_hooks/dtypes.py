"""Hooks where the dtype of a layer is read.

Relies on: `Layer.compute_dtype` and `Layer.dtype_policy` being properties of
`Layer`, through which all readers but `Layer` itself go.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfamp.keras_hooks.layer_record import record_of
from tfamp.keras_hooks.patches import Patch


def patches(before_read: Callable[[keras.layers.Layer], None]) -> list[Patch]:
    """Returns the patches that let an open question be answered first.

    Args:
        before_read: Called with a managed layer that has not been called yet, and
            whose constructor may not have ended.
    """

    def wrap(original: property) -> property:
        read: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

        def decided(self: keras.layers.Layer) -> Any:
            record = record_of(self)
            if record is not None and not record.is_decided:
                before_read(self)
            return read(self)

        return property(decided, original.fset, doc=original.__doc__)

    return [
        Patch(keras.layers.Layer, "compute_dtype", wrap),
        Patch(keras.layers.Layer, "dtype_policy", wrap),
    ]
