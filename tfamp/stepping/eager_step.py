"""Runs a model's own train step eagerly and takes the gradients it would apply."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers
from tfamp.keras_hooks.patches import replaced
from tfamp.loss_scale.tape import FixedScale, scaled_by
from tfamp.stepping.snapshots.names import optimizers_of


class Step(NamedTuple):
    """What a train step came to.

    Attributes:
        loss: The loss without a scale, in float32; None where the step never passed
            one through `scale_loss`.
        gradients: Variable and gradient of everything an optimizer would have
            updated, with the loss scale divided out, in float32. A gradient is None
            where the loss does not depend on the variable.
    """

    loss: tf.Tensor | None
    gradients: tuple[tuple[Any, tf.Tensor | None], ...]
    is_scaled: bool
    logs: Any

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        values = [gradient for _, gradient in self.gradients if gradient is not None]
        values += [] if self.loss is None else [self.loss]
        return all(bool(tf.reduce_all(tf.math.is_finite(value))) for value in values)


def run_step(model: keras.Model, batch: Any, *, loss_scale: float = 1.0) -> Step:
    """Runs `model.train_step` eagerly; optimizers update nothing.

    Layers run as in training, so what they write themselves, such as moving
    statistics, is written; call it inside `unchanged(model)`.
    """
    with contextlib.ExitStack() as stack:
        taken = _Taken(stack.enter_context(scaled_by(loss_scale)))
        stack.enter_context(_eagerly())
        for optimizer in optimizers_of(model):
            stack.enter_context(taken.instead_of(optimizer))
        logs = model.train_step(batch)
    return Step(taken.loss, tuple(taken.gradients), taken.is_scaled, logs)


class _Taken:
    """Stands in for optimizers under a loss scale, and keeps what they are given."""

    def __init__(self, scale: FixedScale) -> None:
        self._scale = scale
        self._factor = scale.factor
        self.loss: tf.Tensor | None = None
        self.gradients: list[tuple[Any, tf.Tensor | None]] = []
        self.is_scaled = False

    @contextlib.contextmanager
    def instead_of(self, optimizer: Any) -> Iterator[None]:
        """Takes what would go to an optimizer, inside the block."""

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            # Left out, they are those that the optimizer was built for.
            known = getattr(optimizer, "inner_optimizer", optimizer)
            if trainable_variables is None:
                trainable_variables = optimizers.trained_by(known)
            self._apply(grads, trainable_variables)

        self._already_unscaled = False
        with replaced(
            optimizer,
            scale_loss=self._scale_loss,
            get_scaled_loss=self._scale_loss,
            get_unscaled_gradients=self._unscale,
            apply_gradients=self._apply_gradients,
            apply=apply,
        ):
            yield

    def _scale_loss(self, loss: Any) -> Any:
        self.is_scaled = self._scale.is_by_hand = True
        value = tf.cast(tf.reduce_sum(loss), tf.float32)
        self.loss = value if self.loss is None else self.loss + value
        return loss * tf.cast(self._factor, loss.dtype)

    def _unscale(self, gradients: Any) -> Any:
        self._already_unscaled = True
        return [self._divided(gradient) for gradient in gradients]

    def _apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> None:
        pairs = list(grads_and_vars)
        self._apply([g for g, _ in pairs], [v for _, v in pairs])

    def _apply(self, gradients: Any, variables: Any) -> None:
        is_scaled = self.is_scaled and not self._already_unscaled
        for gradient, variable in zip(gradients, variables, strict=True):
            value = gradient
            if gradient is not None:
                value = tf.convert_to_tensor(gradient)
                value = self._divided(value) if is_scaled else _float32(value)
            self.gradients.append((variable, value))

    def _divided(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        return _float32(tf.convert_to_tensor(gradient)) / self._factor


def _float32(gradient: tf.Tensor) -> tf.Tensor:
    return tf.cast(gradient, tf.float32)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """Runs functions that a user compiled eagerly too."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def loss_scale_of(model: keras.Model) -> float:
    """Returns the loss scale of a model's first optimizer that has one, else 1."""
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = getattr(optimizer, "scale", None)
            return float(optimizer.dynamic_scale if scale is None else scale)
    return 1.0
