"""The loss scale of an optimizer that its user applies gradients by, unwrapped.

`Optimizer.apply` goes through the companion where a tape scaled gradients for it, and
is Keras's own everywhere else.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.layers import record_of
from tfamp.keras_hooks.optimizers import trained_by
from tfamp.keras_hooks.patches import (
    Function,
    HeldPatches,
    Patch,
    followed_by,
    replaced,
    wrapper,
)
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.plain_optimizers import (
    HERE,
    PLAIN,
    float16_layer_of,
    identities,
    ids_of,
)
from tfamp.loss_scale.scalings import SCALINGS


class Companion(LossScaleOptimizer):
    """Judges the steps of an optimizer that stays as it is.

    It holds no hooks: those stand as long as any managed layer lives, whose gradients
    alone are scaled for it. A traced function may use it for longer. The optimizer
    keeps its `gradient_accumulation_steps`.
    """

    refused_settings = ("loss_scale_factor",)

    def __init__(self, inner_optimizer: Any, **options: Any) -> None:
        super().__init__(inner_optimizer, name="loss_scale_optimizer", **options)
        if inner_optimizer.built:
            self.build(trained_by(inner_optimizer))

    @property
    def shared_clip(self) -> float | None:
        """As for others, but a sum of gradients is clipped by who adds them up."""
        adds_up = self.inner_optimizer.gradient_accumulation_steps is not None
        return None if adds_up else super().shared_clip

    def update_inner(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Runs Keras's own `apply`: that of a subclass has come here by it."""
        with replaced(HERE, is_updating=True):
            keras.optimizers.Optimizer.apply(self.inner_optimizer, gradients, variables)

    def _adopted(self, accumulation_steps: int) -> int:
        return accumulation_steps

    def _come_into_use(self) -> None:
        pass


def _made_under(optimizer: Any, settings: Any) -> Companion:
    """Returns a companion with the loss scale of settings."""
    options = dict(settings.loss_scale_options)
    for name in ("gradient_accumulation_steps", "accumulation_steps"):
        options.pop(name, None)  # each `apply` of a loop is an update
    if settings.loss_scale != "dynamic":
        options.update(initial_scale=float(settings.loss_scale), dynamic=False)
    return Companion(optimizer, **options)


@tf.autograph.experimental.do_not_convert
def _is_applied(optimizer: Any, gradients: Any, variables: Any) -> bool:
    """Has a companion or wrapper apply what a tape scaled for it; returns whether so.

    Keras's own `apply` is left to do otherwise.
    """
    if HERE.is_updating or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False
    PLAIN.know(optimizer)
    outer = PLAIN.wrapper_of(optimizer)
    is_known = outer is not None or PLAIN.may_be_given(optimizer)
    if tf.distribute.in_cross_replica_context() or not is_known:
        return False
    gradients = list(gradients)
    given = trained_by(optimizer) if variables is None else list(variables)
    ids = ids_of(optimizer) or identities(given)
    if outer is not None:
        # A loop with what `compile` was given, scaled for what `compile` made of it.
        if not SCALINGS.knows(outer, ids):
            return False
        with replaced(HERE, entry="inner"):
            outer.apply(gradients, None if variables is None else given)
        return True
    companion = PLAIN.companion_of(optimizer)
    if not SCALINGS.knows(companion, ids):
        return False
    if companion is None:  # not known when the gradients were computed
        layer = float16_layer_of(given)
        settings = None if layer is None else record_of(layer).settings  # type: ignore[union-attr]
        if settings is None or settings.loss_scale is None:
            return False
        companion = PLAIN.given(optimizer, settings)
    if PLAIN.is_first_use(optimizer):
        logging.info(
            "Optimizer %r got a loss scale, as it trains a model in float16. Make it "
            "`tfamp.LossScaleOptimizer(optimizer)` to set and read the scale; pass "
            "`loss_scale=None` to `tfamp.enable` for none.",
            optimizer.name,
        )
    companion.apply(gradients, None if variables is None else given)
    return True


def _know(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        PLAIN.know(optimizer)


@wrapper
def _wrap_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    if not _is_applied(self, grads, trainable_variables):
        original(self, grads, trainable_variables)


PLAIN.make = _made_under

# Held by the settings of managed layers.
PLAIN_HOOKS = HeldPatches(
    [
        Patch(keras.optimizers.Optimizer, "__init__", followed_by(_know)),
        Patch(keras.optimizers.Optimizer, "apply", _wrap_apply),
    ]
)
