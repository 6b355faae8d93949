"""What optimizers of Keras do in loops with a managed layer in float16.

A plain one that is handed gradients of a tape gets a companion, a `LossScaleOptimizer`
around it that judges its steps; it stays the user's object. In the place of Keras's own
`LossScaleOptimizer` one of ours applies, from `compile` on or from the first gradients
that a tape has scaled.
"""

import contextlib
from collections.abc import Callable, Sequence
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
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.step import where_replicas_are_one
from tfamp.loss_scale.tape import (
    GIVE_JUDGE,
    HERE,
    is_wrapper,
    judge_of,
    know,
    may_be_judged,
    scale_of,
    scaled_by_hand,
    set_judge,
    settings_of,
    take_notes,
)

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
    if judge_of(stock) is None:
        _once(stock, lambda: _take_over(stock))
    return judge_of(stock)


def _take_over(stock: Any) -> None:
    settings = stock.initial_scale, stock.dynamic_growth_steps, stock.name
    ours = LossScaleOptimizer(stock.inner_optimizer, *settings)
    if stock.built:
        # Keras 3.10 writes them down on the inner optimizer only.
        known = hooks.trained_by(stock)
        ours.build(known or hooks.trained_by(stock.inner_optimizer))
        ours.set_weights([variable.numpy() for variable in stock.variables])
    set_judge(stock, lambda: ours)
    for name in ("dynamic_scale", "step_counter"):  # what programs log and save
        setattr(stock, name, getattr(ours, name))


def _once(optimizer: Any, make: Callable[[], None]) -> None:
    """Makes variables that outlive the function being traced, once for all replicas."""
    strategy = hooks.strategy_of(optimizer)

    def merged(present: tf.distribute.Strategy) -> None:
        scope = contextlib.nullcontext() if strategy is present else strategy.scope()
        with tf.init_scope(), scope:
            make()

    if tf.distribute.in_cross_replica_context():
        merged(tf.distribute.get_strategy())
    else:
        where_replicas_are_one(merged)


def _companion(optimizer: Any, settings: Any) -> Any:
    """Returns the companion of an optimizer, which a loop is going to use."""
    options = dict(settings.loss_scale_options)
    for name in ("gradient_accumulation_steps", "accumulation_steps"):
        options.pop(name, None)  # each `apply` of a loop is an update
    if settings.loss_scale != "dynamic":
        options.update(initial_scale=float(settings.loss_scale), dynamic=False)

    def make() -> None:
        companion = Companion(optimizer, name="loss_scale_optimizer", **options)
        set_judge(optimizer, lambda: companion)

    _once(optimizer, make)
    return judge_of(optimizer)


def give_judge(optimizer: Any, settings: Any) -> Any:
    """Returns what judges the steps of an optimizer from here on."""
    if is_wrapper(optimizer):
        return exact(optimizer)
    return judge_of(optimizer) or _companion(optimizer, settings)


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    if HERE.is_updating or is_wrapper(self):
        original(self, grads, trainable_variables)
        return
    know(self)
    grads = list(grads)
    given = None if trainable_variables is None else list(trainable_variables)
    variables = hooks.trained_by(self) if given is None else given
    judge = None
    in_replica = not tf.distribute.in_cross_replica_context()
    if in_replica and take_notes(variables, keep=True):
        judge = _judge_for(self, variables)
    if judge is None:
        original(self, grads, given)
        return
    # Nobody hands scaled gradients to an optimizer that does not divide them.
    judge.was_unscaled = True
    with replaced(HERE, update=lambda g, v: original(self, g, v)):
        judge.apply(grads, given)


def _judge_for(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Returns what judges a step of a plain optimizer, None where nobody does."""
    judge = judge_of(optimizer)
    if judge is None or (isinstance(judge, Companion) and not judge.built):
        settings = settings_of(variables) if may_be_judged(optimizer) else None
        if settings is None or settings.loss_scale is None:
            return None
        judge = judge or _companion(optimizer, settings)
        logging.info(
            "Optimizer %r got a loss scale, as it trains a model in float16. Make it "
            "`tfamp.LossScaleOptimizer(optimizer)` to set and read the scale; pass "
            "`loss_scale=None` to `tfamp.enable` for none.",
            optimizer.name,
        )
    # That of one of several inside of a wrapper stays with the wrapper.
    is_ours = isinstance(judge, LossScaleOptimizer)
    return judge if is_ours and judge.inner_optimizer is optimizer else None


@wrapper
def _wrap_scale_loss(original: Function, self: Any, loss: Any) -> Any:
    ours = judge_of(self)
    if ours is not None:
        return ours.scale_loss(loss)
    loss = tf.convert_to_tensor(loss)
    if isinstance(self, LossScaleOptimizer) or not loss.dtype.is_floating:
        return original(self, loss)
    know(self)
    return scaled_by_hand(loss, scale_of(self), is_ours=bool(CALLS.float16_layers))


@wrapper
def _wrap_build(original: Function, self: Any, var_list: Any) -> Any:
    ours = judge_of(self)
    return original(self, var_list) if ours is None else ours.build(var_list)


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_stock_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    ours = judge_of(self)
    if ours is None and not isinstance(self, LossScaleOptimizer):
        know(self)
        variables = trainable_variables
        if variables is None:
            variables = hooks.trained_by(self.inner_optimizer)
        variables = trainable_variables = list(variables)
        if settings_of(variables) is not None and take_notes(variables, keep=True):
            ours = exact(self)
            _once(self, lambda: ours.build(variables))
    if ours is not None:
        return ours.apply(grads, trainable_variables)
    return original(self, grads, trainable_variables)


GIVE_JUDGE.append(give_judge)
# Held by the settings of managed layers.
LOOP_HOOKS = PatchSet(
    [
        Patch(keras.optimizers.Optimizer, "__init__", followed_by(know)),
        Patch(keras.optimizers.Optimizer, "apply", _wrap_apply),
        Patch(_STOCK, "__init__", followed_by(know)),
        Patch(_STOCK, "scale_loss", _wrap_scale_loss),
        Patch(_STOCK, "build", _wrap_build),
        Patch(_STOCK, "apply", _wrap_stock_apply),
    ]
)
