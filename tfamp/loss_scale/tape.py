"""Scales gradients in `tf.GradientTape`, so that training code need not do it.

A tape's target is multiplied by a loss scale and the gradients are divided by it at
once, in float32: the code around sees true gradients, and what overflowed is not
finite. The scale is that of the optimizer that trained a variable last. Ahead of its
first step a variable of a float16 layer has a scale that nobody has claimed yet; the
optimizer that comes to train it claims it, and moves it with its own.

Where code scales its loss by `scale_loss`, it gets the gradients that it expects. A
tape notes at each variable how it gave the gradient, until it is applied where it was
computed. What leaves a function holds each time that it is called.
"""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.backend import HALF, outermost_graph, stored
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.patches import Function, PatchSet, replaced, wrapper
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.rule import DEFAULT_SCALE
from tfamp.records import checks

# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
# Of gradients of inputs inside another tape: what flows back through such a gradient
# has to share what that tape gives.
_NESTED_SCALE = 2.0**8
# Attributes of variables: who trains it; how a tape gave its gradient; whether it was
# told that nobody scales.
_OWNER, _NOTE, _TOLD = "_tfamp_owner", "_tfamp_note", "_tfamp_told"
_JUDGE = "_tfamp_judge"  # of an optimizer: the wrapper that applies for it, or False
_READ = "_tfamp_scales"  # of a function: the scales that it reads, which it holds

_KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers made under the hooks
_LOCK = threading.Lock()


class _Here(threading.local):
    """What this thread is doing."""

    in_step = False  # of a model whose optimizers have scales
    weight: Any = None  # of the batch that it trains on: its examples
    call: "Note | None" = None  # of a tape that computes gradients
    fixed: tuple[float, ...] | None = None  # the scales of `scaled_by`
    is_updating = False  # an inner optimizer makes its update
    update: Any = None  # by which of its methods


HERE = _Here()


@dataclasses.dataclass
class Note:
    """One call of a tape, and how it gave gradients that are not applied yet."""

    is_scaled: bool  # whether its target is multiplied by a scale
    by_hand: Any = None  # that of a loss that code scales; True for one, afterwards
    place: Any = None  # the function being traced; None in eager code
    gradients: Sequence[Any] = ()  # those that it scaled


class Unclaimed:
    """A scale of variables that no optimizer has trained yet."""

    def __init__(self, scale: float) -> None:
        self.dynamic_scale = keras.Variable(scale, trainable=False, dtype="float32")


def scaled_by(*factor: float) -> contextlib.AbstractContextManager[None]:
    """Has the tapes of this thread scale by a number, or not, and tell no optimizer."""
    return replaced(HERE, fixed=factor)


def know(optimizer: Any) -> None:
    """Notes that an optimizer exists, which may come to train something."""
    with _LOCK:
        _KNOWN.add(optimizer)


def set_judge(optimizer: Any, judge: Any) -> None:
    """Notes the wrapper that judges the steps of an optimizer, None to forget it.

    By a function, where Keras looks for no state to save.
    """
    vars(optimizer).pop(_JUDGE, None)
    if judge is not None:
        vars(optimizer)[_JUDGE] = lambda: judge


def judge_of(optimizer: Any) -> Any:
    """Returns what judges for an optimizer: None for nobody yet, False for never."""
    return vars(optimizer).get(_JUDGE, lambda: None)()


def leave_alone(optimizer: Any) -> None:
    """Notes that an optimizer shall have no loss scale."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        set_judge(optimizer, False)


def may_be_judged(optimizer: Any) -> bool:
    """Returns whether an optimizer's steps can be judged here, and it wants that."""
    strategy = tf.distribute.get_strategy()
    is_one = strategy.num_replicas_in_sync == 1
    # A class that makes whole steps has no `apply` of Keras's to be judged.
    home = next(one for one in type(optimizer).__mro__ if "apply" in vars(one))
    names = getattr(vars(home)["apply"], "__code__", None)
    return (
        (is_one or hooks.strategy_of(optimizer) is strategy)
        and judge_of(optimizer) is not False
        and getattr(optimizer, "loss_scale_factor", None) is None
        and (
            home.__module__.startswith(("keras.", "tfamp."))
            or names is None
            or "apply" in names.co_names
        )
    )


def scaled_by_hand(loss: tf.Tensor, scale: Any, *, is_ours: bool) -> tf.Tensor:
    """Returns a loss times a scale, as `scale_loss` does.

    A tape that scales by itself sees the loss as it was, and hears of it. A function
    that is called under a tape has its gradient made ahead, when nobody can know: then
    `is_ours` says whether the tape will scale.
    """

    @tf.custom_gradient
    def multiply(loss: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            call = HERE.call
            if call is not None:
                call.by_hand = scale
            will_scale = is_ours and hooks.is_recording()
            if will_scale if call is None else call.is_scaled:
                return upstream
            return upstream * tf.cast(scale, upstream.dtype)

        return loss * tf.cast(scale, loss.dtype), gradient

    return multiply(loss)


def own(optimizer: Any, variables: Sequence[Any]) -> list[Unclaimed]:
    """Has tapes take an optimizer's scale for variables; returns what it claims."""
    owners = {id(owner): owner for owner in map(owner_of, variables)}
    for variable in variables:
        vars(stored(variable))[_OWNER] = weakref.ref(optimizer)
    return [owner for owner in owners.values() if isinstance(owner, Unclaimed)]


def owner_of(variable: Any) -> Any:
    """Returns what has the scale of a variable, None where nobody has."""
    owner = vars(stored(variable)).get(_OWNER)
    return owner() if isinstance(owner, weakref.ref) else owner


def _scales_of(variables: list[Any]) -> list[Any]:
    """Returns the scales that gradients of variables may be applied under."""
    if HERE.in_step or not CALLS.is_training:
        _make_unclaimed([v for v in variables if owner_of(v) is None])
    owners = {id(owner): owner for owner in map(owner_of, variables) if owner}
    scales = [owner.dynamic_scale.value for owner in owners.values()]
    if (graph := outermost_graph()) is not None:
        setattr(graph, _READ, [*getattr(graph, _READ, ()), *scales])
    return scales


def _make_unclaimed(variables: list[Any]) -> None:
    """Gives variables of a float16 layer a scale, if an optimizer may come to apply."""
    settings = settings_of(variables)
    if settings is None or settings.loss_scale is None:
        return
    ids = {id(stored(variable)) for variable in variables}
    with _LOCK:
        known = list(filter(may_be_judged, _KNOWN))
    trained = [hooks.trained_by(o) if o.built else variables for o in known]
    if all(ids.isdisjoint(id(stored(v)) for v in each) for each in trained):
        _warn_of_no_scale(variables[0])
        return
    start = settings.loss_scale
    if start == "dynamic":
        start = settings.loss_scale_options.get("initial_scale", DEFAULT_SCALE)

    def make() -> None:
        scale = Unclaimed(float(start))
        for variable in variables:
            vars(stored(variable))[_OWNER] = scale

    strategy = tf.distribute.get_strategy()
    with contextlib.suppress(RuntimeError):  # where replicas cannot meet
        if tf.distribute.has_strategy():
            once(strategy, make)
        else:
            with tf.init_scope(), hooks.unseen_by_functions():
                make()


def once(strategy: tf.distribute.Strategy, make: Callable[[], None]) -> None:
    """Makes variables that outlive the function being traced, once for all replicas."""

    def merged() -> None:
        with tf.init_scope(), hooks.scope_of(strategy):
            make()

    hooks.where_replicas_are_one(merged)


def settings_of(variables: Sequence[Any]) -> Any:
    """Returns those of the layer called last here with any of these weights.

    None where it computes nothing in float16.
    """
    asked_for = {id(stored(variable)) for variable in variables}
    for reference in reversed(CALLS.float16_layers):
        layer = reference()
        policy = None if layer is None else policy_of(layer)
        if policy is None or asked_for.isdisjoint(id(stored(w)) for w in layer.weights):
            continue
        if "float16" in structure.compute_dtypes(layer):
            return policy.settings
    return None


def _warn_of_no_scale(variable: Any) -> None:
    """Warns once that gradients of a float16 layer are computed with no loss scale.

    Not in the first eager step, by which an optimizer made ahead of tfamp is found.
    """
    held = vars(stored(variable))
    held[_TOLD] = held.get(_TOLD, 0) + 1
    if held[_TOLD] == (2 if tf.executing_eagerly() else 1):
        held[_TOLD] = 2
        warnings.warn(
            f"The layer of {getattr(variable, 'path', variable.name)!r} computes in "
            "float16, and its gradients are computed with no loss scale: those below "
            "6e-8 are 0. Make the optimizer after `tfamp.enable`, or apply them by "
            "`tfamp.LossScaleOptimizer(optimizer)`, made ahead of the first step. "
            f"{checks.see('failures/tiny-updates')}",
            UserWarning,
            stacklevel=checks.level_of_user(),
        )


def _place() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def take_notes(variables: Iterable[Any], *, keep: bool = False) -> list[Note]:
    """Returns what was noted of gradients at hand, and forgets what is used up.

    Empty where they come from no tape. What left its function holds each time.
    """
    found: dict[int, Note] = {}
    # Replicas share variables, and each of them asks.
    is_one = tf.distribute.get_strategy().num_replicas_in_sync == 1
    for variable in variables:
        held = vars(stored(variable))
        note = held.get(_NOTE)
        if note is not None:
            found[id(note)] = note
            if note.place is _place() and is_one and not keep:
                del held[_NOTE]
    return list(found.values())


def verdict_on(notes: Sequence[Note], gradients: Sequence[Any]) -> tf.Tensor | None:
    """Returns whether all that tapes gave was finite; None if that is not known here.

    Not where `gradients` are what they gave: those are judged themselves. What code
    makes of an overflow may be finite.
    """
    raw = [g for note in notes if note.place is _place() for g in note.gradients]
    given = {id(gradient) for gradient in gradients}
    if all(id(gradient) in given for gradient in raw):
        return None
    return tf.math.is_finite(tf.reduce_sum(sums_of_squares(raw)))


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
    targets, flat = tf.nest.flatten(target), tf.nest.flatten(sources)
    variables = [s for s in flat if isinstance(s, keras.Variable | tf.Variable)]
    can_be_scaled = all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in targets
    )

    def compute(seeds: Any) -> list[Any]:
        return original(self, targets, flat, seeds, unconnected_gradients)

    fixed, scales, is_tried = HERE.fixed, list[Any](), False
    with hooks.asked(self) as can_be_asked_again:
        if not can_be_scaled:
            pass
        elif fixed is not None:
            scales = [*fixed] if variables else []
        elif variables:
            scales = _scales_of(variables)
        elif can_be_asked_again and CALLS.float16_layers and not hooks.in_jacobian():
            # Of inputs, as for a saliency map. Nobody lowers that scale: where it makes
            # gradients overflow they are computed without. A branch of one replica
            # cannot wait for the others, nor can one be vectorized.
            is_tried = tf.distribute.get_strategy().num_replicas_in_sync == 1
            scale = _NESTED_SCALE if hooks.is_recording() else _MAX_HALF_SCALE
            scales = [scale] * is_tried
        call = Note(bool(scales), place=_place())
        with replaced(HERE, call=call):
            if scales:
                found = _scaled(call, scales, compute, targets, flat, output_gradients)
            else:
                found = compute(output_gradients)
            if is_tried:
                found = _or_plain(found, flat, lambda: compute(output_gradients))
    if variables and fixed is None:
        if not isinstance(call.by_hand, float | None):
            call.by_hand = True
        if call.is_scaled:
            call.gradients = [gradient for gradient in found if gradient is not None]
        for variable in variables:
            vars(stored(variable))[_NOTE] = call
    return tf.nest.pack_sequence_as(sources, found)


def _scaled(
    call: Note,
    scales: Sequence[Any],
    compute: Callable[[Any], list[Any]],
    targets: Sequence[tf.Tensor],
    sources: Sequence[Any],
    seeds: Any,
) -> list[Any]:
    """Returns the gradients of a call that is scaled by the least of possible scales.

    They are in float32 for variables, and true, or scaled by the code's own scale where
    it scaled its loss.
    """
    possible = [tf.convert_to_tensor(scale) for scale in scales]
    if any(target.dtype in HALF for target in targets):
        possible.append(tf.constant(_MAX_HALF_SCALE))
    factor = possible[0] if len(possible) == 1 else tf.reduce_min(tf.stack(possible))
    given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
    scaled_seeds = [
        (tf.ones_like(each) if seed is None else tf.convert_to_tensor(seed))
        * tf.cast(factor, each.dtype)
        for each, seed in zip(targets, given, strict=True)
    ]
    found = compute(scaled_seeds)
    divided = (1 if call.by_hand is None else call.by_hand) / factor
    return [
        # The scales of float8 take theirs as a new value.
        g if getattr(s, "overwrite_with_gradient", False) else _like(s, g, divided)
        for s, g in zip(sources, found, strict=True)
    ]


def _like(source: Any, gradient: Any, factor: Any) -> Any:
    """Returns a gradient times a factor, in the dtype that the code expects."""
    is_variable = isinstance(source, keras.Variable | tf.Variable)
    # Else the code around it may combine it with the source, as without a scale.
    dtype = None if is_variable or gradient is None else gradient.dtype
    return None if gradient is None else multiplied(gradient, factor, dtype)


def _or_plain(
    true: list[Any], sources: list[Any], compute: Callable[[], list[Any]]
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed."""
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def plain() -> list[tf.Tensor]:
        found = compute()
        return [tf.convert_to_tensor(_like(sources[i], found[i], 1.0)) for i in known]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = dict(zip(known, tf.cond(is_finite, lambda: dense, plain), strict=True))
    return [chosen.get(i) for i in range(len(true))]


# Held by every optimizer that scales losses, and by all that may need one.
TAPE_HOOKS = PatchSet(hooks.tape_patches(_wrap_gradient))
