"""Scales gradients in `tf.GradientTape`, so that training code need not do it.

A tape's target is multiplied by the loss scale and the gradients are divided by it, in
float32: the code around them sees true gradients. The optimizer is told that nothing
is left to divide. Where the code scales its loss itself, the tape does nothing.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.layers import record_of
from tfamp.keras_hooks.optimizers import (
    asked,
    can_be_asked_again,
    is_recording,
    may_compute_in_half,
    tape_patches,
)
from tfamp.keras_hooks.patches import Function, HeldPatches, replaced, wrapper
from tfamp.keras_hooks.variables import outermost_graph
from tfamp.loss_scale.plain_optimizers import (
    PLAIN,
    as_asked,
    float16_layer_of,
    ids_of,
    warn_of_no_scale,
)
from tfamp.loss_scale.scalings import SCALINGS, ScaledGradients, can_be_scaled
from tfamp.loss_scale.stock import STOCK, patches, scale_of

_TAPE_MARK = "_tfamp_scaled_by_hand"


class FixedScale:
    """A scale that holds in a block, whatever the optimizers' own.

    `is_by_hand` is for the one who multiplies the loss to set; the tape then does
    nothing.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.is_by_hand = False


class _Here(threading.local):
    """What this thread is doing."""

    is_in_gradient: bool = False
    optimizers: tuple[Any, ...] = ()  # of the model whose `train_step` runs
    fixed: FixedScale | None = None


_HERE = _Here()
_LOCK = threading.Lock()
_living: weakref.WeakSet[Any] = weakref.WeakSet()
_read_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def know(optimizer: Any) -> None:
    """Has the tape find an optimizer by the variables that it trains."""
    PLAIN.note_wrapped(optimizer)
    with _LOCK:
        _living.add(optimizer)


def training_with(
    optimizers: Sequence[Any],
) -> contextlib.AbstractContextManager[None]:
    """Marks that a model's `train_step` runs, in this thread."""
    return replaced(_HERE, optimizers=tuple(optimizers))


@contextlib.contextmanager
def scaled_by(factor: float) -> Iterator[FixedScale]:
    """Has the tapes of this thread scale by a number, and tell no optimizer."""
    with replaced(_HERE, fixed=FixedScale(factor)):
        yield _HERE.fixed  # type: ignore[misc]


def _plan(
    tape: tf.GradientTape, target: Any, sources: list[Any]
) -> ScaledGradients | None:
    """Returns how to scale a call of a tape, None where it is left as it is."""
    fixed = _HERE.fixed
    if fixed is not None:
        if fixed.is_by_hand or not can_be_scaled(target) or not _has_variable(sources):
            return None
        return ScaledGradients([fixed.factor], [], is_judged=True)
    with _LOCK:
        living = tuple(_living)
    if not can_be_scaled(target):
        return None
    ids = frozenset(map(id, sources))
    owners = [o for o in living if not ids.isdisjoint(ids_of(o))]
    if owners or _has_variable(sources):
        unbuilt = [o for o in _HERE.optimizers or living if not o.built]
        return _plan_of_variables(tape, target, sources, owners, unbuilt)
    around = _training(tape, living)
    if not around or any(SCALINGS.is_scaled(o) for o in around):
        return None
    # What overflows and cannot be computed again spoils the step, which is skipped.
    is_final = not can_be_asked_again(tape)
    return ScaledGradients(_scales_of(around), [], is_judged=is_final)


def _plan_of_variables(
    tape: tf.GradientTape,
    target: Any,
    sources: list[Any],
    owners: list[Any],
    unbuilt: list[Any],
) -> ScaledGradients | None:
    """Returns how to scale gradients that an optimizer may apply.

    `owners` are built for some of the sources; the `unbuilt` may turn out to be.
    """
    ids = frozenset(map(id, sources))
    others = _unbuilt_others(ids, unbuilt)
    # Of two players one alone may have scaled its loss.
    scaling = [
        optimizer
        for optimizer in (*owners, *unbuilt)
        if _has_scaled(
            optimizer,
            tape,
            None if optimizer.built or not {*owners, *others} - {optimizer} else target,
        )
    ]
    if scaling:
        _note_scaled(tape, ids, scaling, owners)
        return None
    if STOCK.have_scaled(tape, target, ids, has_others=bool(owners or others)):
        return None
    left = _without_owner(sources, owners)
    given, may_apply = _given_scales(left, owners, unbuilt)
    owners, unbuilt = [*owners, *given], [*unbuilt, *may_apply]
    possible = [*owners, *unbuilt]
    if not possible:
        return None
    scalings = [SCALINGS.note(o, is_scaled=False) for o in owners]
    guess = SCALINGS.note_variables(as_asked(sources)) if unbuilt else None
    if guess is not None:
        scalings.append(guess)
        # Eager code knows an optimizer from its second step on; a graph keeps what it
        # is given now.
        if not (
            _HERE.optimizers
            or float16_layer_of(sources) is not None
            or may_compute_in_half()
        ):
            possible = owners
    if not possible:
        return None
    # One that does not move cannot be brought down by what overflows.
    moving = [o for o in possible if getattr(o, "dynamic", True)]
    scales = _scales_of(moving or possible)
    if guess is not None and not owners and not tf.executing_eagerly():
        # Without an optimizer nobody would judge what overflows.
        is_taken = guess.wait_for_optimizer(getattr(scales[0], "device", ""))
        _hold(is_taken)
        scales = [tf.where(is_taken, tf.convert_to_tensor(s), 1.0) for s in scales]
    return ScaledGradients(scales, scalings, is_judged=True)


def _has_scaled(optimizer: Any, tape: tf.GradientTape, target: Any) -> bool:
    """Returns whether an optimizer's `scale_loss` gave what a tape is asked for.

    A persistent tape is asked again when the first gradients are applied. The target
    matters where others may have made it.
    """
    if target is None and optimizer in getattr(tape, _TAPE_MARK, ()):
        return True
    return SCALINGS.is_scaled(optimizer, target)


def _note_scaled(
    tape: tf.GradientTape, ids: frozenset[int], scaling: list[Any], owners: list[Any]
) -> None:
    """Notes that gradients are going to come scaled, for all that train their part."""
    marked: weakref.WeakSet[Any] = getattr(tape, _TAPE_MARK, weakref.WeakSet())
    marked.update(scaling)
    setattr(tape, _TAPE_MARK, marked)
    known = frozenset().union(*map(ids_of, scaling))
    is_sure = all(optimizer.built for optimizer in scaling)
    rest = ids - known if is_sure else frozenset()
    for owner in owners:
        # One loss was scaled for all.
        if owner in scaling or not rest.isdisjoint(ids_of(owner)):
            SCALINGS.note(owner, is_scaled=True)


def _unbuilt_others(ids: frozenset[int], unbuilt: list[Any]) -> list[Any]:
    """Returns the optimizers of a loop, or a `train_step`, that may yet be built."""
    if _HERE.optimizers:
        return unbuilt
    plain = PLAIN.candidates(ids)[1]
    return [*filter(PLAIN.is_free, unbuilt), *plain]


def _without_owner(sources: list[Any], owners: list[Any]) -> list[Any]:
    """Returns the variables among the sources that none of the owners trains."""
    return [
        source
        for source in sources
        if _is_variable(source) and not any(id(source) in ids_of(o) for o in owners)
    ]


def _given_scales(
    left: list[Any], owners: list[Any], unbuilt: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns companions of optimizers that were given no loss scale by anybody.

    First those of optimizers that are built for sources without an owner, the ones that
    are `left`, then those of optimizers that may turn out to be. Keras's own wrappers
    are among them, with the scales that they have.
    """
    if not left:
        return [], []
    stock, unbuilt_stock = STOCK.candidates(frozenset(map(id, left)))
    layer = float16_layer_of(left, is_part=bool(stock or unbuilt_stock))
    settings = None if layer is None else record_of(layer).settings  # type: ignore[union-attr]
    if settings is None or settings.loss_scale is None:
        return [], []
    built: list[Any] = []
    others: list[Any] = []
    ids = frozenset(map(id, left))
    if PLAIN.is_left_alone(ids):
        return [], []
    if not tf.distribute.in_cross_replica_context():
        built, others = PLAIN.candidates(ids)
    if _HERE.optimizers and unbuilt:
        others, unbuilt_stock = [], []  # one of the model's own trains them
    if not (owners or unbuilt or built or others or stock or unbuilt_stock):
        warn_of_no_scale(layer)
    return (
        [*stock, *PLAIN.given_to(built, settings)],
        [*unbuilt_stock, *PLAIN.given_to(others, settings)],
    )


def _scales_of(optimizers: Sequence[Any]) -> list[Any]:
    """Returns the variables of scales; a graph that reads them holds them.

    It may be traced with the scale of an optimizer that turns out to have no part in
    it, and run when that is gone.
    """
    scales = [scale_of(optimizer) for optimizer in optimizers]
    _hold(*scales)
    return scales


def _hold(*variables: Any) -> None:
    """Lets the function that is being traced hold variables that it reads."""
    graph = outermost_graph()
    if graph is not None:
        _read_in.setdefault(graph, []).extend(variables)


def _has_variable(sources: Sequence[Any]) -> bool:
    return any(map(_is_variable, sources))


def _is_variable(source: Any) -> bool:
    return isinstance(source, keras.Variable | tf.Variable)


def _training(tape: tf.GradientTape, living: Sequence[Any]) -> Sequence[Any]:
    """Returns the optimizers for which a gradient of no variable is computed."""
    # A branch of one replica cannot wait for the others.
    has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
    is_nested = is_recording() and can_be_asked_again(tape)
    if has_replicas or not (_HERE.optimizers or is_nested):
        return ()
    watched = frozenset(map(id, tape.watched_variables()))
    owners = [o for o in living if not watched.isdisjoint(ids_of(o))]
    return owners or _HERE.optimizers


@wrapper
@tf.autograph.experimental.do_not_convert
def _wrap_gradient(
    original: Function,
    self: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    flat = tf.nest.flatten(sources)
    # Inside another gradient a tape is part of some layer's own gradient.
    plan = None if _HERE.is_in_gradient else _plan(self, target, flat)
    with replaced(_HERE, is_in_gradient=True), asked(self):
        if plan is None:
            return original(
                self, target, sources, output_gradients, unconnected_gradients
            )

        def compute(targets: list[Any], seeds: Any) -> list[Any]:
            return original(self, targets, flat, seeds, unconnected_gradients)

        true = plan.gradients(compute, target, flat, output_gradients)
    return tf.nest.pack_sequence_as(sources, true)


# Held by every optimizer that scales losses, and by all that may need one.
TAPE_HOOKS = HeldPatches(
    [
        *tape_patches(_wrap_gradient),
        *patches(),
    ]
)
