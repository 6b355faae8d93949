"""Scaled losses and unscaled gradients, by the names of Keras 3 and legacy Keras."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.loss_scale.gradients import multiplied
from tfamp.loss_scale.parts import Parts
from tfamp.loss_scale.tape.scalings import SCALINGS

_HALF = (tf.float16, tf.bfloat16)


class ScalingLosses(Parts):
    """What a training loop calls before it has gradients."""

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the loss scale; a half-precision loss as float32.

        Args:
            loss: A number or tensor of any shape.
        """
        SCALINGS.say(self, is_scaled=True)
        return self._scaled(loss)

    def get_scaled_loss(self, loss: Any) -> Any:
        """As `scale_loss`; takes a callable too and returns one, as legacy Keras."""
        SCALINGS.say(self, is_scaled=True)
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._scaled(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of a scaled loss divided by the scale.

        The next `apply` or `apply_gradients` takes what came through here as it is, as
        legacy Keras did.

        Args:
            grads: Tensors, `tf.IndexedSlices` or None.
        """
        SCALINGS.say(self, is_scaled=False)
        factor = 1 / tf.convert_to_tensor(self.dynamic_scale.value)
        return [None if g is None else multiplied(g, factor) for g in grads]

    def minimize(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None
    ) -> Any:
        """Computes the gradients of a loss and applies them, as legacy Keras.

        Args:
            loss: A callable without arguments, or a tensor computed under `tape`.
            var_list: The variables, or a callable that returns them.
            tape: The tape of `loss` where that is a tensor.

        Returns:
            The `iterations` of the inner optimizer.
        """
        if tape is None and not callable(loss):
            raise ValueError(
                f"`loss` is {loss!r} and `tape` is None; expected a callable or the "
                "tape that recorded the loss. Pass `tape=tape`."
            )
        with tape if tape is not None else tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        variables = list(var_list() if callable(var_list) else var_list)
        raw = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        gradients = tape.gradient(scaled, raw)
        return self.apply_gradients(zip(gradients, variables, strict=True))

    def _scaled(self, loss: Any) -> Any:
        loss = tf.convert_to_tensor(loss)
        if loss.dtype in _HALF:
            loss = tf.cast(loss, tf.float32)
        return loss * tf.cast(self.dynamic_scale.value, loss.dtype)
