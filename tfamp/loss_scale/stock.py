"""Keras's own `LossScaleOptimizer`, in programs that used it before they knew tfamp.

`compile` of a managed model puts a `LossScaleOptimizer` of tfamp in its place, around
the same inner optimizer. The program still holds Keras's: what it asks of that one goes
to ours. In a loop around any other model it keeps its own scale: a loss that came
through its `scale_loss` is left alone by the tape, and other gradients of a managed
layer are scaled there, so that they have to be multiplied again before it divides.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.optimizers import trained_by
from tfamp.keras_hooks.patches import Function, Patch, followed_by, wrapper
from tfamp.loss_scale.gradients import multiplied
from tfamp.loss_scale.plain_optimizers import (
    PLAIN,
    float16_layer_of,
    identities,
    ids_of,
)
from tfamp.loss_scale.scalings import SCALINGS, Scaling

_MARK = "_tfamp_scaled_by_keras"
_STOCK = keras.optimizers.LossScaleOptimizer


class StockWrappers:
    """The wrappers of Keras that live, and what took the place of some."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replaced: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, stock: Any) -> None:
        """Notes that a wrapper exists."""
        with self._lock:
            self._known.add(stock)

    def replace(self, stock: Any, ours: Any) -> None:
        """Has a wrapper be another name of ours, which holds its inner optimizer."""
        with self._lock:
            self._replaced[stock] = ours
        # What programs log.
        own = {n: getattr(ours, n) for n in ("dynamic_scale", "step_counter")}
        vars(stock).update(own)

    def replacement_of(self, stock: Any) -> Any:
        """Returns what took the place of a wrapper, None where nothing did."""
        return self._replaced.get(stock)

    def have_scaled(
        self, tape: Any, targets: Any, ids: frozenset[int], *, has_others: bool
    ) -> bool:
        """Returns whether a tape is asked for gradients of a loss that one has scaled.

        `ids` are the identities of what it is asked for; `has_others` says that there
        are others who may train it.
        """
        marked = getattr(tape, _MARK, None) or weakref.WeakSet()
        found = False
        for stock in self._kept():
            own = ids_of(stock.inner_optimizer)
            if not own and has_others:
                if not SCALINGS.is_scaled(stock, targets):
                    continue
            elif not (SCALINGS.is_scaled(stock) or stock in marked):
                continue
            elif own and own.isdisjoint(ids):
                continue
            # A persistent tape is asked again when the first gradients are applied.
            marked.add(stock)
            SCALINGS.note(stock, is_scaled=True)
            found = True
        setattr(tape, _MARK, marked)
        return found

    def candidates(self, ids: frozenset[int]) -> tuple[list[Any], list[Any]]:
        """Returns those that may apply gradients of variables of the identities `ids`.

        First those that are built for any of them, then those that are not built.
        """
        kept = self._kept()
        owners = [s for s in kept if not ids.isdisjoint(ids_of(s.inner_optimizer))]
        return owners, [s for s in kept if not s.inner_optimizer.built]

    def _kept(self) -> list[Any]:
        with self._lock:
            return [s for s in self._known if s not in self._replaced]


STOCK = StockWrappers()


def _is_stock(optimizer: Any) -> bool:
    return not hasattr(type(optimizer), "last_step_skipped")  # what ours have


def _note(optimizer: Any) -> None:
    if _is_stock(optimizer):
        PLAIN.note_wrapped(optimizer)
        STOCK.know(optimizer)


@wrapper
def _wrap_scale_loss(original: Function, self: Any, loss: Any) -> Any:
    ours = STOCK.replacement_of(self)
    if ours is not None:
        return ours.scale_loss(loss)
    _note(self)
    scaled = original(self, loss)
    SCALINGS.note(self, is_scaled=True).add_loss(scaled)
    return scaled


@wrapper
def _wrap_build(original: Function, self: Any, var_list: Any) -> Any:
    ours = STOCK.replacement_of(self)
    return original(self, var_list) if ours is None else ours.build(var_list)


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_apply(
    original: Function, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    ours = STOCK.replacement_of(self)
    if ours is not None:
        return ours.apply(grads, trainable_variables)
    _note(self)
    grads = list(grads)
    given = None if trainable_variables is None else list(trainable_variables)
    variables = given or trained_by(self.inner_optimizer)
    ids = ids_of(self.inner_optimizer) or identities(variables)
    scaling = SCALINGS.take(self, ids)
    if scaling is None or scaling.is_scaled:
        return original(self, grads, given)
    if float16_layer_of(variables, is_part=True) is None:
        return original(self, grads, given)
    factor = _factor(self, scaling, grads)
    scaled = [None if g is None else multiplied(g, factor) for g in grads]
    return original(self, scaled, given)


def scale_of(optimizer: Any) -> Any:
    """Returns the variable of a scale, or the number it is going to start with."""
    scale = vars(optimizer).get("dynamic_scale")
    return float(optimizer.initial_scale) if scale is None else scale.value


def _factor(stock: Any, scaling: Scaling, gradients: Sequence[Any]) -> tf.Tensor:
    """Returns what true gradients are multiplied by ahead of being divided.

    NaN where the tape gave gradients that were not finite and have been made so: Keras
    then skips the step. At a scale of 1 a lower one is no remedy.
    """
    scale = tf.convert_to_tensor(scale_of(stock), tf.float32)
    verdict = scaling.verdict_on(gradients)
    if verdict is None:
        return scale
    return tf.where(verdict | (scale <= 1.0), scale, float("nan"))


def patches() -> list[Patch]:
    """Returns the patches on Keras's wrapper."""
    return [
        Patch(_STOCK, "__init__", followed_by(_note)),
        Patch(_STOCK, "scale_loss", _wrap_scale_loss),
        Patch(_STOCK, "build", _wrap_build),
        Patch(_STOCK, "apply", _wrap_apply),
    ]
