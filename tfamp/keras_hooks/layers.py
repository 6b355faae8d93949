"""Hooks where layers are made.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with
None meaning the global policy object; `RNN.__init__` running after its cell
exists; `Bidirectional.__init__` making its two layers from a config, which
turns the dtype that the given layer inherited into an explicit one.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfamp.keras_hooks.patches import Patch, like


def patches(
    around: Callable[[], contextlib.AbstractContextManager[None]],
    after: Callable[[keras.layers.Layer, Any], None],
    after_recurrent: Callable[[keras.layers.Layer], None],
    after_bidirectional: Callable[[keras.layers.Layer, keras.layers.Layer], None],
) -> list[Patch]:
    """Returns the patches that report each new layer.

    Args:
        around: Gives a context for a layer's own initialisation, in which the
            global policy is what it should be.
        after: Called with the layer and the `dtype` argument it was given.
            Only what `Layer.__init__` sets can be read then: the subclass's
            constructor has not finished.
        after_recurrent: Called with a recurrent layer whose cell exists.
        after_bidirectional: Called with a `Bidirectional` layer and the
            recurrent layer it was given.
    """

    def wrap_layer(original: Callable[..., None]) -> Callable[..., None]:
        @like(original)
        def __init__(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
            with around():
                original(self, *args, **kwargs)
                after(self, kwargs.get("dtype"))

        return __init__

    def wrap_recurrent(original: Callable[..., None]) -> Callable[..., None]:
        @like(original)
        def __init__(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            after_recurrent(self)

        return __init__

    def wrap_bidirectional(original: Callable[..., None]) -> Callable[..., None]:
        @like(original)
        def __init__(
            self: keras.layers.Layer, layer: Any, *args: Any, **kwargs: Any
        ) -> None:
            original(self, layer, *args, **kwargs)
            after_bidirectional(self, layer)

        return __init__

    return [
        Patch(keras.layers.Layer, "__init__", wrap_layer),
        Patch(keras.layers.RNN, "__init__", wrap_recurrent),
        Patch(keras.layers.Bidirectional, "__init__", wrap_bidirectional),
    ]
