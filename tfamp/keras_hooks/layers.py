"""Hooks where layers are made and their dtypes read, and Keras's global policy.

Relies on: `Layer.__init__` storing the policy of its `dtype` argument, with None
meaning the global policy object; `RNN.__init__` running after its cell exists;
`Bidirectional.__init__` making its two layers from a config, which turns the dtype that
the given layer inherited into an explicit one; `Layer.compute_dtype` and
`Layer.dtype_policy` being properties of `Layer`, through which all readers but `Layer`
itself go; `global_state` keeping the policy and anything else by name, per thread, and
`clear_session` dropping all of it at once.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state

from tfamp.keras_hooks.layer_record import record_of
from tfamp.keras_hooks.patches import Patch, like

_MARK = "tfamp_lease"
_POLICY = "dtype_policy"


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
        after: Called with the layer and the `dtype` argument it was given. Only what
            `Layer.__init__` sets can be read: the subclass's constructor goes on.
        after_recurrent: Called with a recurrent layer whose cell exists.
        after_bidirectional: Called with a `Bidirectional` layer and the layer given.
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


def read_patches(before_read: Callable[[keras.layers.Layer], None]) -> list[Patch]:
    """Returns the patches by which a layer's dtype is decided before it is read.

    `before_read` is called with a managed layer that has not been called yet, and
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

    names = ("compute_dtype", "dtype_policy")
    return [Patch(keras.layers.Layer, name, wrap) for name in names]


def is_marked(settings: Any) -> bool:
    """Returns whether this thread's state still carries the mark of `settings`."""
    return global_state.get_global_attribute(_MARK) is settings


def mark(settings: Any, policy: keras.DTypePolicy | None) -> None:
    """Sets this thread's global policy and the mark; None for `settings` unmarks."""
    global_state.set_global_attribute(_MARK, settings)
    global_state.set_global_attribute(_POLICY, policy)


def present_policy() -> keras.DTypePolicy | None:
    """Returns this thread's global policy object, None where none was set."""
    return global_state.get_global_attribute(_POLICY)
