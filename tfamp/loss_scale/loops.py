"""What optimizers of Keras do in loops with a managed layer in float16.

A plain one that is handed gradients of a tape gets a companion, a `LossScaleOptimizer`
around it that judges its steps; it stays the user's object. Keras's own
`LossScaleOptimizer` divides by its scale what the tape has divided already, so that it
is handed those gradients multiplied again; where `compile` put one of ours in its
place, that one applies.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.optimizers import strategy_of, trained_by
from tfamp.keras_hooks.patches import (
    Function,
    Patch,
    PatchSet,
    followed_by,
    replaced,
    wrapper,
)
from tfamp.loss_scale import candidates
from tfamp.loss_scale.gradients import multiplied
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.scales import (
    HERE,
    Note,
    come_from_tape,
    own,
    scale_of,
    scaled_by_hand,
    take_notes,
    tell_open_scales,
    verdict_on,
)
from tfamp.loss_scale.tape import float16_layer_of

_STOCK = keras.optimizers.LossScaleOptimizer


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

    def _come_into_use(self) -> None:
        pass


def _companion(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns a companion for the first step of an optimizer, None for none."""
    if not candidates.may_be_given(optimizer):
        return None
    layer = float16_layer_of(variables)
    settings = None if layer is None else policy_of(layer).settings  # type: ignore[union-attr]
    if settings is None or settings.loss_scale is None:
        return None
    options = dict(settings.loss_scale_options)
    for name in ("gradient_accumulation_steps", "accumulation_steps"):
        options.pop(name, None)  # each `apply` of a loop is an update
    if settings.loss_scale != "dynamic":
        options.update(initial_scale=float(settings.loss_scale), dynamic=False)
    # Outside of the function that is being traced, which it outlives.
    with tf.init_scope(), _scope_of(optimizer):
        companion = Companion(optimizer, **options)
    candidates.give_companion(optimizer, companion)
    logging.info(
        "Optimizer %r got a loss scale, as it trains a model in float16. Make it "
        "`tfamp.LossScaleOptimizer(optimizer)` to set and read the scale; pass "
        "`loss_scale=None` to `tfamp.enable` for none.",
        optimizer.name,
    )
    return companion


def _scope_of(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    strategy = strategy_of(optimizer)
    is_present = strategy is tf.distribute.get_strategy()
    return contextlib.nullcontext() if is_present else strategy.scope()


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    if HERE.is_updating or candidates.is_wrapper(self):
        original(self, grads, trainable_variables)
        return
    candidates.know(self)
    grads = list(grads)
    given = None if trainable_variables is None else list(trainable_variables)
    variables = trained_by(self) if given is None else given
    if not come_from_tape(variables) or tf.distribute.in_cross_replica_context():
        original(self, grads, given)
        return
    # A loop with what `compile` was given, scaled for what `compile` made of it.
    outer = candidates.wrapper_of(self)
    judge = outer or _companion(self, variables)
    if judge is None:
        original(self, grads, given)
        return
    # Nobody hands scaled gradients to an optimizer that does not divide them.
    judge.was_unscaled = True
    with replaced(HERE, entry="inner"):
        judge.apply(grads, given)


@wrapper
def _wrap_scale_loss(original: Function, self: Any, loss: Any) -> Any:
    ours = candidates.replacement_of(self)
    if ours is not None:
        return ours.scale_loss(loss)
    if candidates.is_ours(self):
        return original(self, loss)
    candidates.know(self)
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        return original(self, loss)
    scale = tf.convert_to_tensor(scale_of(self), tf.float32)
    return scaled_by_hand(loss, scale, is_ours=bool(CALLS.float16_layers))


@wrapper
def _wrap_build(original: Function, self: Any, var_list: Any) -> Any:
    ours = candidates.replacement_of(self)
    return original(self, var_list) if ours is None else ours.build(var_list)


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_stock_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    ours = candidates.replacement_of(self)
    if ours is not None:
        return ours.apply(grads, trainable_variables)
    if candidates.is_ours(self):
        return original(self, grads, trainable_variables)
    candidates.know(self)
    grads = list(grads)
    given = None if trainable_variables is None else list(trainable_variables)
    variables = trained_by(self.inner_optimizer) if given is None else given
    notes = take_notes(variables)
    if not any(note.is_judged for note in notes):
        return original(self, grads, given)
    if not self.built:
        with tf.init_scope():
            self.build(variables)
    own(self, variables)
    verdict = verdict_on(notes, grads)
    scaled = grads
    if verdict is not None or not all(note.is_by_hand for note in notes):
        factor = _factor(self, notes, verdict)
        scaled = [None if g is None else multiplied(g, factor) for g in grads]
    with replaced(HERE, is_updating=True):
        original(self, scaled, given)
    tell_open_scales(self)


def _factor(stock: Any, notes: Sequence[Note], verdict: Any) -> tf.Tensor:
    """Returns what true gradients are multiplied by ahead of being divided.

    NaN where the tape gave gradients that were not finite and have been made so: Keras
    then skips the step. At a scale of 1 a lower one is no remedy.
    """
    scale = tf.convert_to_tensor(scale_of(stock), tf.float32)
    factor = tf.constant(1.0) if all(n.is_by_hand for n in notes) else scale
    if verdict is None:
        return factor
    return tf.where(verdict | (scale <= 1.0), factor, float("nan"))


# Held by the settings of managed layers.
LOOP_HOOKS = PatchSet(
    [
        Patch(keras.optimizers.Optimizer, "__init__", followed_by(candidates.know)),
        Patch(keras.optimizers.Optimizer, "apply", _wrap_apply),
        Patch(_STOCK, "__init__", followed_by(candidates.know)),
        Patch(_STOCK, "scale_loss", _wrap_scale_loss),
        Patch(_STOCK, "build", _wrap_build),
        Patch(_STOCK, "apply", _wrap_stock_apply),
    ]
)
