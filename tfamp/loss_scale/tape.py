"""Scales gradients in `tf.GradientTape`, so that training code need not do it.

A tape's target is multiplied by the loss scale and the gradients are divided by it, in
float32: the code around them sees true gradients, and what overflowed is not finite.
The scale is that of the optimizers that have trained the variables. Where code scales
its loss by `scale_loss`, it gets the gradients that it expects, scaled so.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.optimizers import (
    asked,
    can_be_asked_again,
    is_recording,
    may_compute_in_half,
    tape_patches,
    watches_here,
)
from tfamp.keras_hooks.patches import Function, PatchSet, replaced, wrapper
from tfamp.keras_hooks.variables import outermost_graph, stored
from tfamp.loss_scale import candidates
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.scales import (
    HERE,
    TapeCall,
    is_variable,
    note,
    open_scale_of,
    own,
    owners_of,
    scale_by_hand,
    scale_of,
    without_owner,
)
from tfamp.records import checks

# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
_LEAST_NORMAL = 2.0**-14  # of float16; what is less has fewer bits
_Compute = Callable[[list[Any], Any], list[Any]]  # of targets and their seeds

_met: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_read_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class FixedScale:
    """A scale that holds in a block, whatever the optimizers' own.

    `is_by_hand` is for the one who multiplies the loss to set; the tape then does
    nothing.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.is_by_hand = False


class _Fixed(threading.local):
    scale: FixedScale | None = None


_FIXED = _Fixed()


@contextlib.contextmanager
def scaled_by(factor: float) -> Iterator[FixedScale]:
    """Has the tapes of this thread scale by a number, and tell no optimizer."""
    fixed = FixedScale(factor)
    with replaced(_FIXED, scale=fixed):
        yield fixed


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
    if HERE.call is not None:  # a tape that is part of some layer's own gradient
        return original(self, target, sources, output_gradients, unconnected_gradients)
    flat = tf.nest.flatten(sources)
    variables = [source for source in flat if is_variable(source)]
    fixed, scales = _FIXED.scale, []
    if _can_be_scaled(target):
        if fixed is not None:
            scales = [fixed.factor] * (bool(variables) and not fixed.is_by_hand)
        else:
            scales = _scales_of(variables) if variables else _scales_around(self)
            by_hand = scale_by_hand(target)
            if scales and by_hand is not None:
                scales = [by_hand]

    def compute(targets: list[Any], seeds: Any) -> list[Any]:
        return original(self, targets, flat, seeds, unconnected_gradients)

    is_again = not variables and can_be_asked_again(self)
    call = TapeCall(is_scaled=bool(scales))
    with replaced(HERE, call=call), asked(self):
        if not scales:
            found = original(
                self, target, sources, output_gradients, unconnected_gradients
            )
        else:
            given = _scaled(
                call,
                scales,
                compute,
                target,
                flat,
                output_gradients,
                is_nested=is_again and is_recording(),
            )
            if is_again:  # what overflows and cannot be asked again spoils the step
                given = _or_as_they_are(given, flat, compute, target, output_gradients)
            found = tf.nest.pack_sequence_as(sources, given)
    if not variables and not scales and CALLS.float16_layers:
        _warn_of_tiny_gradients(tf.nest.flatten(found))
    if variables and fixed is None:
        known = [g for g in tf.nest.flatten(found) if g is not None]
        verdict = None
        if scales and known:
            verdict = tf.math.is_finite(tf.reduce_sum(sums_of_squares(known)))
        note(
            variables,
            known,
            is_judged=bool(scales),
            is_by_hand=bool(call.by_hand),
            verdict=verdict,
        )
    return found


def _scales_of(variables: list[Any]) -> list[Any]:
    """Returns the scales that gradients of variables may be applied under."""
    left = without_owner(variables)
    if left:
        for wrapper_of_keras in candidates.wrappers_built_for(left):
            own(wrapper_of_keras, left)
        left = without_owner(left)
    owners = owners_of(variables)
    layer = float16_layer_of(left) if left else None
    settings = None if layer is None else policy_of(layer).settings  # type: ignore[union-attr]
    if not left or (settings is not None and settings.loss_scale is None):
        return _held(owners)
    waiting: list[Any] = []
    if settings is not None and (HERE.optimizers or not CALLS.is_training):
        waiting = candidates.waiting(HERE.optimizers, settings, left)
        if not (owners or waiting):
            _warn_of_no_scale(layer)
    if tf.executing_eagerly():  # who applies them is known from the second step on
        return _held(owners) + waiting
    if layer is None and not may_compute_in_half():
        return _held(owners)
    scale = open_scale_of(left)
    _hold(scale)
    given = tf.convert_to_tensor(scale.variable)
    if not owners:
        return [given]
    scales = _held(owners)  # for all of them, until the other one is given
    return [*scales, tf.where(tf.equal(given, 1.0), scales[0], given)]


def _scales_around(tape: tf.GradientTape) -> list[Any]:
    """Returns the scales for a gradient of no variable.

    Within training they are those of the optimizers; outside, as for a saliency map, a
    number that is left out where it makes gradients overflow.
    """
    # A branch of one replica cannot wait for the others.
    has_replicas = tf.distribute.get_strategy().num_replicas_in_sync > 1
    can_be_asked = can_be_asked_again(tape)
    is_nested = is_recording() and can_be_asked
    if has_replicas:
        return []
    if HERE.optimizers or is_nested:
        scales = _held(owners_of(tape.watched_variables()) or HERE.optimizers)
        if scales:
            return scales
    is_of_inputs = can_be_asked and watches_here(tape) and not CALLS.is_training
    return [_MAX_HALF_SCALE] if is_of_inputs and CALLS.float16_layers else []


def _held(optimizers: Sequence[Any]) -> list[Any]:
    """Returns the variables of scales; a graph that reads them holds them.

    It may be traced with the scale of an optimizer that turns out to have no part in
    it, and run when that is gone. One that does not move cannot be brought down by what
    overflows.
    """
    moving = [o for o in optimizers if getattr(o, "dynamic", True)]
    scales = [scale_of(optimizer) for optimizer in moving or optimizers]
    _hold(*scales)
    return scales


def _hold(*values: Any) -> None:
    """Lets the function that is being traced hold what it reads."""
    graph = outermost_graph()
    if graph is not None:
        _read_in.setdefault(graph, []).extend(values)


def float16_layer_of(sources: Sequence[Any]) -> Any:
    """Returns the layer called last here of which weights in float16 are asked for.

    Other weights of a layer that has some in float16 will do.
    """
    asked_for = {id(stored(source)) for source in sources}
    for reference in reversed(CALLS.float16_layers):
        layer = reference()
        if layer is None or policy_of(layer) is None:
            continue
        weights = {id(stored(weight)) for weight in layer.weights}
        if not asked_for.isdisjoint(weights) and any(
            part.compute_dtype == "float16" for _, part, _ in structure.walk(layer)
        ):
            return layer
    return None


def _warn_of_no_scale(layer: Any) -> None:
    """Warns once that a float16 layer's gradients are computed with no loss scale.

    Not of the first eager step, by which an optimizer made ahead of tfamp is found.
    """
    if layer in _warned:
        return
    if tf.executing_eagerly() and layer not in _met:
        _met.add(layer)
        return
    _warned.add(layer)
    warnings.warn(
        f"{type(layer).__name__} {layer.name!r} computes in float16, and its gradients "
        "are computed with no loss scale: those below 6e-8 are 0. Make the optimizer "
        "after `tfamp.enable`, or apply them by `tfamp.LossScaleOptimizer(optimizer)`, "
        f"made ahead of the first step. {checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


def _warn_of_tiny_gradients(gradients: Sequence[Any]) -> None:
    """Warns once where gradients of what a layer gave are too small for float16.

    They are in float16, as what they are of, so that no scale helps.
    """
    layer = CALLS.float16_layers[-1]()
    if layer is None or layer in _warned or policy_of(layer) is None:
        return
    halves = [g for g in gradients if tf.is_tensor(g) and g.dtype == tf.float16]
    if not halves or not tf.executing_eagerly():
        return
    largest = max(float(tf.reduce_max(tf.abs(g))) for g in halves)
    if not largest < _LEAST_NORMAL:
        return
    _warned.add(layer)
    warnings.warn(
        f"A gradient of what {type(layer).__name__} {layer.name!r} computed in float16 "
        f"is at most {largest:.1e}, and what is below 6e-8 is 0 there. Multiply the "
        "target by 1024 ahead of `tape.gradient`, and divide the result in float32. "
        f"{checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


def _can_be_scaled(target: Any) -> bool:
    """Returns whether all targets are tensors with gradients of their own dtype."""
    targets = tf.nest.flatten(target)
    return bool(targets) and all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in targets
    )


def _scaled(
    call: TapeCall,
    scales: Sequence[Any],
    compute: _Compute,
    target: Any,
    sources: Sequence[Any],
    seeds: Any,
    *,
    is_nested: bool,
) -> list[Any]:
    """Returns the gradients of a call that is scaled by the least of possible scales.

    They are in float32 for variables, and true, or scaled by the code's own scale where
    it scaled its loss. Where it `is_nested`, what flows back through the gradient is
    divided by its scale, so that it and the gradient share what the tape around gives.
    """
    targets = tf.nest.flatten(target)
    possible = [tf.convert_to_tensor(scale) for scale in scales]
    if any(each.dtype in HALF for each in targets):
        possible.append(tf.constant(_MAX_HALF_SCALE))
    factor = possible[0] if len(possible) == 1 else tf.reduce_min(tf.stack(possible))
    factor = tf.sqrt(factor) if is_nested else factor
    given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
    scaled_seeds = [
        (tf.ones_like(each) if seed is None else tf.convert_to_tensor(seed))
        * tf.cast(factor, each.dtype)
        for each, seed in zip(targets, given, strict=True)
    ]
    found = compute(targets, scaled_seeds)
    divided = (call.by_hand[0] if call.by_hand else 1) / factor
    return [
        _unscaled(g, source, divided) for g, source in zip(found, sources, strict=True)
    ]


def _unscaled(gradient: Any, source: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    true = multiplied(gradient, factor)
    if is_variable(source) or true.dtype == gradient.dtype:
        return true
    # The code around it may combine it with the source, as without a scale.
    return tf.cast(true, gradient.dtype)


def _or_as_they_are(
    true: list[Any], sources: list[Any], compute: _Compute, target: Any, seeds: Any
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed.

    No optimizer judges them and lowers the scale.
    """
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def without_a_scale() -> list[tf.Tensor]:
        plain = compute(tf.nest.flatten(target), seeds)
        return [
            tf.convert_to_tensor(_unscaled(plain[i], sources[i], 1.0)) for i in known
        ]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = tf.cond(is_finite, lambda: dense, without_a_scale)
    found = dict(zip(known, chosen, strict=True))
    return [found.get(i) for i in range(len(true))]


# Held by every optimizer that scales losses, and by all that may need one.
TAPE_HOOKS = PatchSet(tape_patches(_wrap_gradient))
