"""Scales gradients in `tf.GradientTape`, so that training code need not do it.

A tape's target is multiplied by the loss scale and the gradients are divided by it, in
float32: the code around them sees true gradients. The optimizer is told that nothing
is left to divide. Where the code scales its loss itself, the tape does nothing.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp._care import CALLS
from tfamp._patch import HeldPatches, Patch, like
from tfamp.keras_hooks import tapes
from tfamp.keras_hooks.optimizers import trained_by
from tfamp.loss_scale import forgotten
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.scaled import SCALINGS, Scaling

_HALF = (tf.float16, tf.bfloat16)
# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
_TAPE_MARK = "_tfamp_scaled_by_hand"


class FixedScale:
    """A scale that holds in a block, whatever the optimizers' own.

    Args:
        factor: What gradients of variables are multiplied by on their way.

    Attributes:
        is_by_hand: Whether the loss was multiplied by it already, which is for the one
            who multiplies to say; the tape then does nothing.
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
_ids: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def know(optimizer: Any) -> None:
    """Has the tape find an optimizer by the variables that it trains."""
    with _LOCK:
        _living.add(optimizer)


@contextlib.contextmanager
def training_with(optimizers: Sequence[Any]) -> Iterator[None]:
    """Marks that a model's `train_step` runs, in this thread.

    Args:
        optimizers: The model's optimizers that scale losses.
    """
    before = _HERE.optimizers
    _HERE.optimizers = tuple(optimizers)
    try:
        yield
    finally:
        _HERE.optimizers = before


@contextlib.contextmanager
def scaled_by(factor: float) -> Iterator[FixedScale]:
    """Has the tapes of this thread scale by a number, and tell no optimizer."""
    before, _HERE.fixed = _HERE.fixed, FixedScale(factor)
    try:
        yield _HERE.fixed
    finally:
        _HERE.fixed = before


def ids_of(optimizer: Any) -> frozenset[int]:
    """Returns the identities of what an optimizer trains, as a tape may be asked."""
    if not optimizer.built:
        return frozenset()
    if optimizer not in _ids:
        _ids[optimizer] = _identities(trained_by(optimizer))
    return _ids[optimizer]


def _identities(variables: Sequence[Any]) -> frozenset[int]:
    return frozenset(
        id(x) for v in variables for x in (v, getattr(v, "value", v)) if not callable(x)
    )


_Compute = Callable[[list[Any], Any], list[Any]]  # of targets and their seeds


class _Plan:
    """How one call of a tape is scaled.

    Args:
        scales: The possible scales, of which the smallest is taken.
        scalings: What to tell of the gradients, where an optimizer may apply them.
        is_judged: Whether somebody looks at the gradients, so that an overflow may be
            left to see.
    """

    def __init__(
        self, scales: Sequence[Any], scalings: Sequence[Scaling], *, is_judged: bool
    ) -> None:
        self._scales = [tf.convert_to_tensor(scale) for scale in scales]
        self._scalings = scalings
        self._is_judged = is_judged
        self._is_nested = not is_judged and tapes.is_recording()

    def gradients(
        self, compute: _Compute, target: Any, sources: list[Any], seeds: Any
    ) -> list[Any]:
        """Returns the true gradients, in float32 for variables."""
        targets = tf.nest.flatten(target)
        factor = self._factor(targets)
        scaled = compute(targets, _scaled_seeds(targets, seeds, factor))
        true = [
            _unscaled(gradient, source, 1 / factor)
            for gradient, source in zip(scaled, sources, strict=True)
        ]
        if self._is_judged:
            self._tell(true)
            return true
        return _or_as_they_are(true, sources, lambda: compute(targets, seeds))

    def _factor(self, targets: Sequence[Any]) -> tf.Tensor:
        scales = list(self._scales)
        if any(target.dtype in _HALF for target in targets):
            scales.append(tf.constant(_MAX_HALF_SCALE))
        least = scales[0] if len(scales) == 1 else tf.reduce_min(tf.stack(scales))
        # What flows back through this gradient is divided by its scale, so that it and
        # the gradient share what the tape around gives.
        return tf.sqrt(least) if self._is_nested else least

    def _tell(self, gradients: Sequence[Any]) -> None:
        """Notes whether the gradients are finite: what follows may hide it."""
        gradients = [g for g in gradients if g is not None]
        if not (gradients and self._scalings):
            return
        verdict = tf.math.is_finite(tf.reduce_sum(sums_of_squares(gradients)))
        for scaling in self._scalings:
            scaling.verdicts.append(verdict)
            scaling.gradients += [weakref.ref(g) for g in gradients]


def _plan(tape: tf.GradientTape, target: Any, sources: list[Any]) -> _Plan | None:
    """Returns how to scale a call of a tape, None where it is left as it is."""
    fixed = _HERE.fixed
    if fixed is not None:
        if fixed.is_by_hand or not _can_be_scaled(target) or not _has_variable(sources):
            return None
        return _Plan([fixed.factor], [], is_judged=True)
    with _LOCK:
        living = tuple(_living)
    if not _can_be_scaled(target):
        return None
    ids = frozenset(map(id, sources))
    owners = [o for o in living if not ids.isdisjoint(ids_of(o))]
    if owners or _has_variable(sources):
        unbuilt = [o for o in _HERE.optimizers or living if not o.built]
        return _plan_of_variables(tape, sources, owners, unbuilt)
    around = _training(tape, living)
    if not around or any(SCALINGS.is_scaled(o) for o in around):
        return None
    return _Plan(_scales_of(around), [], is_judged=False)


def _plan_of_variables(
    tape: tf.GradientTape, sources: list[Any], owners: list[Any], unbuilt: list[Any]
) -> _Plan | None:
    """Returns how to scale gradients that an optimizer may apply.

    Args:
        tape: The tape.
        sources: The variables.
        owners: The optimizers that are built for some of them.
        unbuilt: Those that may turn out to be.
    """
    possible = [*owners, *unbuilt]
    by_hand = getattr(tape, _TAPE_MARK, False)
    if by_hand or any(SCALINGS.is_scaled(o) for o in possible):
        # For all, as one loss was scaled for all. A persistent tape stays so.
        for owner in owners:
            SCALINGS.say(owner, is_scaled=True)
        setattr(tape, _TAPE_MARK, True)
        return None
    if not possible:
        forgotten.warn_of_no_scale(sources)
        return None
    scalings = [SCALINGS.say(o, is_scaled=False) for o in owners]
    if unbuilt:
        scalings.append(SCALINGS.say_of_variables(_identities(sources)))
    # One that does not move cannot be brought down by what overflows.
    moving = [o for o in possible if o.dynamic]
    return _Plan(_scales_of(moving or possible), scalings, is_judged=True)


def _scales_of(optimizers: Sequence[Any]) -> list[Any]:
    return [optimizer.dynamic_scale.value for optimizer in optimizers]


def _has_variable(sources: Sequence[Any]) -> bool:
    return any(isinstance(source, keras.Variable | tf.Variable) for source in sources)


def _training(tape: tf.GradientTape, living: Sequence[Any]) -> Sequence[Any]:
    """Returns the optimizers for which a gradient of no variable is computed.

    None where it could not be computed again if it overflowed.
    """
    is_training = bool(_HERE.optimizers) or tapes.is_recording()
    # A branch of one replica cannot wait for the others.
    has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
    if not is_training or has_replicas or not tapes.can_be_asked_again(tape):
        return ()
    watched = frozenset(map(id, tape.watched_variables()))
    owners = [o for o in living if not watched.isdisjoint(ids_of(o))]
    return owners or _HERE.optimizers


def _can_be_scaled(target: Any) -> bool:
    targets = tf.nest.flatten(target)
    return bool(targets) and all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in targets
    )


def _scaled_seeds(targets: list[Any], seeds: Any, factor: tf.Tensor) -> list[Any]:
    given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
    return [
        (tf.ones_like(target) if seed is None else tf.convert_to_tensor(seed))
        * tf.cast(factor, target.dtype)
        for target, seed in zip(targets, given, strict=True)
    ]


def _unscaled(gradient: Any, source: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    true = multiplied(gradient, factor)
    if isinstance(source, keras.Variable | tf.Variable) or true.dtype == gradient.dtype:
        return true
    # The code around it may combine it with the source, as without a scale.
    return tf.cast(true, gradient.dtype)


def _or_as_they_are(
    true: list[Any], sources: list[Any], again: Callable[[], list[Any]]
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed.

    No optimizer judges them and lowers the scale.
    """
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def without_a_scale() -> list[tf.Tensor]:
        plain = again()
        return [
            tf.convert_to_tensor(_unscaled(plain[i], sources[i], 1.0)) for i in known
        ]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = tf.cond(is_finite, lambda: dense, without_a_scale)
    found = dict(zip(known, chosen, strict=True))
    return [found.get(i) for i in range(len(true))]


def _wrap_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    @like(original)
    @tf.autograph.experimental.do_not_convert
    def gradient(
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        flat = tf.nest.flatten(sources)
        # Inside another gradient a tape is part of some layer's own gradient.
        plan = None if _HERE.is_in_gradient else _plan(self, target, flat)
        before, _HERE.is_in_gradient = _HERE.is_in_gradient, True
        try:
            with tapes.asked(self):
                if plan is None:
                    return original(
                        self, target, sources, output_gradients, unconnected_gradients
                    )

                def compute(targets: list[Any], seeds: Any) -> list[Any]:
                    return original(self, targets, flat, seeds, unconnected_gradients)

                true = plan.gradients(compute, target, flat, output_gradients)
        finally:
            _HERE.is_in_gradient = before
        return tf.nest.pack_sequence_as(sources, true)

    return gradient


def _wrap_scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes that Keras's own wrapper is used, in code that knows of scales."""

    @like(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        CALLS.scales_by_hand = True
        return original(self, loss)

    return scale_loss


# Held by every optimizer that scales losses, and by all that may need one.
TAPE_HOOKS = HeldPatches(
    [
        *tapes.patches(_wrap_gradient),
        Patch(keras.optimizers.LossScaleOptimizer, "scale_loss", _wrap_scale_loss),
    ]
)
