"""Hooks where layers are written as configurations and made from them.

Keras writes the dtype that a layer inherited as if it had been passed, so a clone
would take every dtype for the user's own. The serialized dtype says which it is, in an
entry of its own that stock Keras passes over.

Relies on: `Layer.get_config` serializing the policy into a dict under "dtype";
`deserialize_keras_object` passing over entries it does not know; layers being
made by `Operation.from_config`, or by a `from_config` of their own that hands
that dict to `Layer.__init__`; `Model.build_from_config` tracing `self.call` on float32
inputs.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfamp.keras_hooks import calls
from tfamp.keras_hooks.layer_record import CALLS, record_of
from tfamp.keras_hooks.patches import Patch, like, replaced

_HALF = ("float16", "bfloat16")
_INHERITED = "tfamp_inherited"


def write_patches(policy_of: Callable[[keras.layers.Layer], str | None]) -> list[Patch]:
    """Returns the patch that writes down which dtypes were inherited.

    Args:
        policy_of: Returns the name of the policy that a layer's dtype came from, None
            where it was passed to the layer or nobody knows.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def get_config(self: keras.layers.Layer) -> dict[str, Any]:
            config = original(self)
            name, dtype = policy_of(self), config.get("dtype")
            if name is not None and isinstance(dtype, dict):
                config["dtype"] = {**dtype, _INHERITED: name}
            return config

        return get_config

    return [Patch(keras.layers.Layer, "get_config", wrap)]


def read_patches(
    is_in_force: Callable[[str], bool],
    after_quantized: Callable[[keras.layers.Layer], None],
) -> list[Patch]:
    """Returns the patch that lets a layer inherit its dtype as the written one did.

    Args:
        is_in_force: States whether new layers come under the policy of a name.
        after_quantized: Called with a quantized layer, which needs the dtype that was
            written, where the written one inherited it.
    """

    def wrap(original: Any) -> Any:
        def from_config(cls: type, config: dict[str, Any]) -> Any:
            dtype = config.get("dtype")
            name = inherited_from(dtype)
            if dtype is None or name is None or not is_in_force(name):
                return original.__func__(cls, config)
            if dtype["class_name"] != "DTypePolicy":
                layer = original.__func__(cls, config)
                after_quantized(layer)
                return layer
            config = {k: v for k, v in config.items() if k != "dtype"}
            return original.__func__(cls, config)

        return classmethod(from_config)

    return [Patch(keras.Operation, "from_config", wrap)]


def build_patches() -> list[Patch]:
    """Returns the patch that builds a loaded model from inputs as in a real call."""
    return [Patch(keras.Model, "build_from_config", _wrap_build)]


def _wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hands a loaded model's `call`, by which it is built, inputs as in a real call."""

    @like(original)
    def build_from_config(self: keras.Model, config: Any) -> Any:
        dtype = self.compute_dtype
        if record_of(self) is None or dtype not in _HALF:
            return original(self, config)
        plain = self.call

        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = calls.cast_outputs((args, kwargs), dtype)
            return plain(*args, **kwargs)

        CALLS.num_builds += 1
        try:
            with replaced(self, call=call):
                return original(self, config)
        finally:
            CALLS.num_builds -= 1

    return build_from_config


def inherited_from(dtype: Any) -> str | None:
    """Returns the policy that a serialized dtype came from, None if it was passed."""
    return dtype.get(_INHERITED) if isinstance(dtype, dict) else None
