"""What optimizers of Keras do in loops with a managed layer in float16.

A plain one that is handed gradients of a tape gets a companion, a `LossScaleOptimizer`
around it that judges its steps; it stays the user's object. In the place of Keras's own
`LossScaleOptimizer` one of ours applies, from `compile` on or from the first gradients
that a tape has scaled.
"""

from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks.layers import CALLS
from tfamp.keras_hooks.patches import (
    Function,
    Patch,
    PatchSet,
    followed_by,
    replaced,
    wrapper,
)
from tfamp.loss_scale import tape
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.tape import HERE, judge_of

_STOCK = keras.optimizers.LossScaleOptimizer


class Companion(LossScaleOptimizer):
    """Judges the steps of an optimizer that stays as it is.

    It holds no hooks: those stand as long as any managed layer lives, whose gradients
    alone are scaled for it. The optimizer keeps its `gradient_accumulation_steps`.
    """

    done_here = ("loss_scale_factor",)

    def _come_into_use(self) -> None:
        if self.inner_optimizer.built:
            self.build(hooks.trained_by(self.inner_optimizer))


def exact(stock: Any) -> LossScaleOptimizer:
    """Returns our optimizer in the place of Keras's own, with its state.

    It is the same one each time: what a program asks of Keras's goes there.
    """
    if isinstance(stock, LossScaleOptimizer):
        return stock

    def make() -> None:
        settings = stock.initial_scale, stock.dynamic_growth_steps, stock.name
        ours = LossScaleOptimizer(stock.inner_optimizer, *settings)
        if stock.built:
            # Keras 3.10 writes them down on the inner optimizer only.
            known = hooks.trained_by(stock)
            ours.build(known or hooks.trained_by(stock.inner_optimizer))
            ours.set_weights([variable.numpy() for variable in stock.variables])
        tape.set_judge(stock, ours)
        vars(stock).update(build=ours.build, scale_loss=ours.scale_loss)
        for name in ("dynamic_scale", "step_counter"):  # what programs log and save
            setattr(stock, name, getattr(ours, name))

    if judge_of(stock) is None:
        tape.once(hooks.strategy_of(stock), make)
    return judge_of(stock)


def _companion(optimizer: Any, settings: Any) -> None:
    """Gives an optimizer its companion, as a loop begins to use it."""
    options = dict(settings.loss_scale_options)
    for name in ("gradient_accumulation_steps", "accumulation_steps"):
        options.pop(name, None)  # each `apply` of a loop is an update
    if settings.loss_scale != "dynamic":
        options.update(initial_scale=float(settings.loss_scale), dynamic=False)

    def make() -> None:
        made = Companion(optimizer, name="loss_scale_optimizer", **options)
        tape.set_judge(optimizer, made)

    tape.once(hooks.strategy_of(optimizer), make)
    logging.info(
        "Optimizer %r got a loss scale, as it trains a model in float16. Make it "
        "`tfamp.LossScaleOptimizer(optimizer)` to set and read the scale; pass "
        "`loss_scale=None` to `tfamp.enable` for none.",
        optimizer.name,
    )


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Has a wrapper judge a step of gradients that a tape has given in a loop."""
    if HERE.is_updating or isinstance(self, LossScaleOptimizer):
        return original(self, grads, trainable_variables)
    tape.know(self)
    variables, judge = trainable_variables, judge_of(self)
    if judge is None and not tf.distribute.in_cross_replica_context():
        variables = list(hooks.trained_by(self) if variables is None else variables)
        noted = tape.may_be_judged(self) and tape.take_notes(variables, keep=True)
        settings = tape.settings_of(variables) if noted else None
        if settings is not None and isinstance(self, _STOCK):
            judge = exact(self)
            tape.once(hooks.strategy_of(self), lambda: judge.build(variables))
        elif settings is not None and settings.loss_scale is not None:
            _companion(self, settings)
            judge = judge_of(self)
    if not judge:
        return original(self, grads, trainable_variables)
    if isinstance(self, _STOCK):
        return judge.apply(grads, variables)
    # Nobody hands scaled gradients to an optimizer that does not divide them.
    judge.was_unscaled = True
    with replaced(HERE, update=lambda g, v: original(self, g, v)):
        return judge.apply(list(grads), variables)


@wrapper
def _wrap_scale_loss(original: Function, self: Any, loss: Any) -> Any:
    loss = tf.convert_to_tensor(loss)
    if isinstance(self, LossScaleOptimizer) or not loss.dtype.is_floating:
        return original(self, loss)
    # A variable, or the number that it is going to start with.
    scale = vars(self).get("dynamic_scale")
    scale = float(self.initial_scale) if scale is None else scale.value
    return tape.scaled_by_hand(loss, scale, is_ours=bool(CALLS.float16_layers))


# Held by the settings of managed layers.
LOOP_HOOKS = PatchSet(
    [
        Patch(keras.optimizers.Optimizer, "__init__", followed_by(tape.know)),
        Patch(keras.optimizers.Optimizer, "apply", _wrap_apply),
        Patch(_STOCK, "scale_loss", _wrap_scale_loss),
        Patch(_STOCK, "apply", _wrap_apply),
    ]
)
