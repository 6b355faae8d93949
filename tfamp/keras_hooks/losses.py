"""Hooks on what losses are given and how they are added up.

Relies on: `Loss.__call__` casting predictions to its own dtype, whereby the
cast tensor loses the logits Keras hung on the prediction; `Trainer.compute_loss`
adding `model.losses` to the main loss, which must all have one dtype.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.layer_record import record_of
from tfamp.keras_hooks.patches import Patch, like

_HALF = (tf.float16, tf.bfloat16)


def patches(careful_mark: str) -> list[Patch]:
    """Returns the patches on `Loss.__call__` and `Layer.add_loss`.

    Args:
        careful_mark: Attribute of predictions made by a managed layer in half
            precision; only those are treated.
    """

    def widen_prediction(x: Any) -> Any:
        if not hasattr(x, careful_mark):
            return x
        wide = backend.cast(x, "float32")
        wide._keras_logits = backend.cast(x._keras_logits, "float32")
        mask = backend.get_keras_mask(x)
        if mask is not None:
            backend.set_keras_mask(wide, mask)
        return wide

    def wrap_loss(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def __call__(
            self: keras.Loss, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any
        ) -> Any:
            y_pred = tree.map_structure(widen_prediction, y_pred)
            return original(self, y_true, y_pred, *args, **kwargs)

        return __call__

    def widen_loss(x: Any) -> Any:
        if isinstance(x, tf.Tensor) and x.dtype in _HALF:
            return backend.cast(x, "float32")
        return x

    def wrap_add_loss(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def add_loss(self: keras.layers.Layer, loss: Any) -> Any:
            if record_of(self) is not None:
                loss = tree.map_structure(widen_loss, loss)
            return original(self, loss)

        return add_loss

    return [
        Patch(keras.Loss, "__call__", wrap_loss),
        Patch(keras.layers.Layer, "add_loss", wrap_add_loss),
    ]
