"""Scales gradients in `tf.GradientTape`, so that training code need not do it.

A tape's target is multiplied by a loss scale and the gradients are divided by it at
once, in float32: the code around sees true gradients, and what overflowed is not
finite. The scale is that of the optimizer that trained a variable last, and ahead of
its first step the least of all that may come to train it.

Where code scales its loss by `scale_loss`, it gets the gradients that it expects. A
tape notes at each variable how it gave the gradient; that holds in one thread, and in
the function being traced there, until it is applied. Where gradients leave a function,
it holds each time.
"""

import contextlib
import dataclasses
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers as hooks
from tfamp.keras_hooks import structure
from tfamp.keras_hooks.backend import HALF, outermost_graph, stored
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.patches import Function, PatchSet, replaced, wrapper
from tfamp.records import checks

# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
# Of gradients of inputs inside another tape: what flows back through such a gradient
# has to share what that tape gives.
_NESTED_SCALE = 2.0**8
_FACTS = "_tfamp_gradients"
_MAX_NOTES = 256  # calls of a tape whose gradients an update adds up
# Under XLA each reduction is a kernel of its own, which 200 small variables make slow
# to compile; gradients of one size up to this are reduced together.
_MAX_STACKED_ELEMENTS = 2**16
_Compute = Callable[[list[Any], Any], list[Any]]  # of targets and their seeds

_JUDGE, _NOBODY = "_tfamp_judge", types.SimpleNamespace(built=True)
_WAYS_TO_APPLY = frozenset(("apply", "apply_gradients"))

# What gives an optimizer its judge, under the settings of a layer.
GIVE_JUDGE: list[Callable[[Any, Any], Any]] = []
KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that may come to apply
_LOCK = threading.RLock()
_read_in: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


class _Thread:
    """A thread, which is gone when this is: the identity of one is used again."""


class _Here(threading.local):
    """What this thread is doing."""

    def __init__(self) -> None:
        self.thread = _Thread()
        self.in_step = False  # of a model whose optimizers have scales
        self.weight: Any = None  # of the batch that it trains on: its examples
        self.call: _TapeCall | None = None  # of a tape that computes gradients
        self.latest: Note | None = None
        self.fixed: FixedScale | None = None
        self.is_updating = False  # an inner optimizer makes its update
        self.update: Any = None  # by which of its methods


HERE = _Here()


@dataclasses.dataclass
class _TapeCall:
    """One call of a tape, while it computes gradients."""

    is_scaled: bool  # whether its target is multiplied by a scale
    by_hand: list[Any] = dataclasses.field(default_factory=list)  # scales, of losses


@dataclasses.dataclass
class Note:
    """How one call of a tape gave gradients."""

    place: Any  # a reference to the traced function, or the thread
    by_hand: Any  # what gradients are scaled by: None, a number, or True for a scale
    gradients: Sequence[Any]  # references
    verdict: Callable[[], Any]  # gives whether they were finite, None if unknown


class _Facts:
    """What is known of one variable."""

    def __init__(self) -> None:
        self.owner: Callable[[], Any] = lambda: None  # the optimizer that trains it
        self.notes: Any = weakref.WeakKeyDictionary()  # lists, by their places
        self.num_unscaled = 0  # gradients in float16 that nobody had a scale for


def multiplied(gradient: Any, factor: Any, dtype: Any = None) -> Any:
    """Returns `gradient` times a float32 scalar, in float32 at least or in `dtype`."""
    if isinstance(gradient, tf.IndexedSlices):
        values = multiplied(gradient.values, factor, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient
    return tf.cast(wide * tf.cast(factor, wide.dtype), dtype or wide.dtype)


def sums_of_squares(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of each gradient: shape (gradients,), float32.

    A sum is non-finite where an element is, or where the sum leaves float32. Rows of
    `tf.IndexedSlices` with the same index are added up first.

    Example:
        >>> sums_of_squares([tf.constant([3.0, 4.0]), tf.constant([[2.0]])]).numpy()
        array([25.,  4.], dtype=float32)
    """
    in_xla = hooks.in_xla()
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices) and not in_xla:
            rows = multiplied(gradient, 1.0)
            unique, at = tf.unique(rows.indices)
            gradient = tf.math.unsorted_segment_sum(rows.values, at, tf.size(unique))
        tensors.append(tf.cast(tf.convert_to_tensor(gradient), tf.float32))
    if not in_xla:
        return tf.stack([2 * tf.nn.l2_loss(tensor) for tensor in tensors])
    by_size: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        is_large = size is None or size > _MAX_STACKED_ELEMENTS
        by_size.setdefault(-position - 1 if is_large else size, []).append(position)
    parts, order = [], list[int]()
    for positions in by_size.values():
        if len(positions) == 1:
            tensor = tensors[positions[0]]
            has_rows = (tensor.shape.rank or 0) > 1
            sums = _sum_of_last(tensor) if has_rows else tf.square(tensor)
            parts.append(tf.reduce_sum(sums)[None])
        else:
            rows = [tf.reshape(tensors[p], [-1]) for p in positions]
            parts.append(_sum_of_last(tf.stack(rows)))
        order += positions
    inverse = [order.index(position) for position in range(len(tensors))]
    return tf.gather(tf.concat(parts, 0), inverse)


def _sum_of_last(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sums of squares over the last axis.

    On CPUs XLA multiplies matrices on all cores and sums on one.
    """
    squares = tf.square(tensor)
    if tf.config.list_physical_devices("GPU"):
        return tf.reduce_sum(squares, -1)
    return tf.linalg.matvec(squares, tf.ones(tf.shape(squares)[-1:]))


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
                call.by_hand.append(scale)
            will_scale = is_ours and hooks.is_recording()
            if will_scale if call is None else call.is_scaled:
                return upstream
            return upstream * tf.cast(scale, upstream.dtype)

        return loss * tf.cast(scale, loss.dtype), gradient

    return multiply(loss)


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether an optimizer scales losses for another one."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def know(optimizer: Any) -> None:
    """Notes that an optimizer exists, and what it wraps."""
    with _LOCK:
        KNOWN.add(optimizer)
    inner = vars(optimizer).get("inner_optimizer")
    if is_wrapper(optimizer) and inner is not None:
        for leaf in hooks.leaves(inner):
            set_judge(leaf, weakref.ref(optimizer))


def set_judge(optimizer: Any, judge: Callable[[], Any]) -> None:
    """Notes what gives the wrapper that judges the steps of an optimizer.

    A function, where Keras looks for no state to save.
    """
    vars(optimizer)[_JUDGE] = judge


def judge_of(optimizer: Any) -> Any:
    """Returns the wrapper that judges for an optimizer, None where nobody does."""
    return vars(optimizer).get(_JUDGE, lambda: None)()


def leave_alone(optimizer: Any) -> None:
    """Notes that an optimizer shall have no loss scale."""
    if not is_wrapper(optimizer):
        set_judge(optimizer, lambda: _NOBODY)


def may_be_judged(optimizer: Any) -> bool:
    """Returns whether an optimizer may be given a loss scale.

    Not where it updates variables in an `apply` of its own that never comes to Keras's:
    it would not be asked whether gradients are finite.
    """
    strategy = tf.distribute.get_strategy()
    is_alone = strategy.num_replicas_in_sync == 1
    is_here = is_alone or hooks.strategy_of(optimizer) is strategy
    if is_wrapper(optimizer) or not is_here:
        return is_here
    base, cls = keras.optimizers.Optimizer, type(optimizer)
    methods = [getattr(cls, name) for name in _WAYS_TO_APPLY]
    own = [m for m in methods if m not in (base.apply, base.apply_gradients)]
    named = [getattr(getattr(m, "__code__", None), "co_names", ()) for m in own]
    return (
        getattr(optimizer, "loss_scale_factor", None) is None
        and hooks.leaves(optimizer) == [optimizer]
        and not any(_WAYS_TO_APPLY.isdisjoint(names) for names in named)
    )


def scale_of(optimizer: Any) -> Any:
    """Returns the variable of a scale, or the number it is going to start with."""
    scale = vars(optimizer).get("dynamic_scale")
    return float(optimizer.initial_scale) if scale is None else scale.value


def _facts(variable: Any) -> _Facts:
    held = vars(stored(variable))
    found = held.get(_FACTS)
    return held.setdefault(_FACTS, _Facts()) if found is None else found


def own(optimizer: Any, variables: Iterable[Any]) -> None:
    """Has tapes take the scale of an optimizer for the variables that it trains."""
    for variable in variables:
        facts = _facts(variable)
        if facts.owner() is not optimizer:
            facts.owner = weakref.ref(optimizer)


def _place() -> Any:
    """Returns the function that is being traced, or what stands for this thread."""
    return outermost_graph() or HERE.thread


def _note(variables: Sequence[Any], gradients: Sequence[Any], call: _TapeCall) -> None:
    """Notes how a tape gave gradients of variables, and if they were finite."""
    verdict = None
    if call.is_scaled and gradients:
        verdict = tf.math.is_finite(tf.reduce_sum(sums_of_squares(gradients)))
    by_hand: Any = call.by_hand[0] if call.by_hand else None
    noted = HERE.latest = Note(
        weakref.ref(_place()),
        by_hand if by_hand is None or isinstance(by_hand, float) else True,
        tuple(weakref.ref(gradient) for gradient in gradients),
        _read_later(verdict),
    )
    with _LOCK:
        for variable in variables:
            here = _facts(variable).notes.setdefault(_place(), [])
            here.append(noted)
            del here[:-_MAX_NOTES]  # of gradients that nobody applies


def note_unscaled() -> None:
    """Notes that the code divides gradients by the scale that it has put in."""
    if HERE.latest is not None and HERE.latest.place() is _place():
        HERE.latest.by_hand = None


def take_notes(variables: Iterable[Any], *, keep: bool = False) -> list[Note]:
    """Returns what was noted of gradients at hand, and forgets what is used up.

    Empty where they come from no tape.
    """
    place = _place()
    here: dict[int, Note] = {}
    elsewhere: dict[int, Note] = {}
    with _LOCK:
        held = [_facts(variable).notes for variable in variables]
        for notes in held:
            found = notes.get(place, ()) if keep else notes.pop(place, ())
            here.update((id(each), each) for each in found)
            for other, found in notes.items():
                if not isinstance(other, _Thread):  # what left a function
                    elsewhere.update((id(each), each) for each in found)
    return list((here or elsewhere).values())


def verdict_on(notes: Sequence[Note], gradients: Sequence[Any]) -> tf.Tensor | None:
    """Returns whether all that tapes gave was finite; None if that is not known.

    Not where `gradients` are what they gave: those are judged themselves. What code
    makes of an overflow may be finite.
    """
    given = {id(gradient) for gradient in gradients}
    references = [reference for each in notes for reference in each.gradients]
    if all(r() is not None and id(r()) in given for r in references):
        return None
    verdicts = [each.verdict() for each in notes]
    here = [v for v in verdicts if v is not None and _is_usable(v)]
    return tf.reduce_all(tf.stack(here)) if here else None


def _read_later(tensor: Any) -> Callable[[], Any]:
    """Returns what gives a tensor again, without keeping the graph that it is of."""
    if tensor is None or not tf.is_symbolic_tensor(tensor):
        return lambda: tensor
    graph, name = weakref.ref(tensor.graph), tensor.name

    def read() -> Any:
        present = graph()
        return None if present is None else present.get_tensor_by_name(name)

    return read


def _is_usable(tensor: Any) -> bool:
    """Returns whether a tensor can be read here: not from within a branch or loop."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph is not tensor.graph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def _scales_of(variables: list[Any]) -> list[Any]:
    """Returns the scales that gradients of variables may be applied under."""
    owners = {id(o): o for v in variables if (o := _facts(v).owner()) is not None}
    left = [v for v in variables if _facts(v).owner() is None]
    settings: Any = settings_of(left) if left else None
    is_due = settings is not None and (HERE.in_step or not CALLS.is_training)
    if is_due and settings.loss_scale is not None:
        with contextlib.suppress(RuntimeError):  # where replicas cannot meet
            waiting = [GIVE_JUDGE[0](o, settings) for o in _waiting(left)]
            owners.update((id(o), o) for o in waiting)
        if not owners:
            _warn_of_no_scale(left[0])
    scales = [scale_of(owner) for owner in owners.values()]
    if not tf.executing_eagerly():  # the function holds what it reads
        _read_in.setdefault(outermost_graph(), []).extend(scales)
    return scales


def _waiting(variables: Sequence[Any]) -> list[Any]:
    """Returns the optimizers that may take their first step on variables."""
    ids = {id(stored(variable)) for variable in variables}
    built, others = list[Any](), list[Any]()
    with _LOCK:
        known = tuple(KNOWN)
    for each in known:
        judge = judge_of(each)
        if may_be_judged(each) if judge is None else not judge.built:
            if not each.built:
                others.append(each)
            elif not ids.isdisjoint(id(stored(v)) for v in hooks.trained_by(each)):
                built.append(each)
    return built or others


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
        parts = (part for _, part, _ in structure.walk(layer))
        if any(part.compute_dtype == "float16" for part in parts):
            return policy.settings
    return None


def _warn_of_no_scale(variable: Any) -> None:
    """Warns once that gradients of a float16 layer are computed with no loss scale.

    Not in the first eager step, by which an optimizer made ahead of tfamp is found.
    """
    facts = _facts(variable)
    facts.num_unscaled += 1
    if facts.num_unscaled == (2 if tf.executing_eagerly() else 1):
        facts.num_unscaled = 2
        warnings.warn(
            f"The layer of {getattr(variable, 'path', variable.name)!r} computes in "
            "float16, and its gradients are computed with no loss scale: those below "
            "6e-8 are 0. Make the optimizer after `tfamp.enable`, or apply them by "
            "`tfamp.LossScaleOptimizer(optimizer)`, made ahead of the first step. "
            f"{checks.see('failures/tiny-updates')}",
            UserWarning,
            stacklevel=checks.level_of_user(),
        )


class FixedScale:
    """A scale that holds in a block, whatever the optimizers' own.

    `is_by_hand` is for the one who multiplies the loss to set; the tape then does
    nothing.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.is_by_hand = False


@contextlib.contextmanager
def scaled_by(factor: float) -> Iterator[FixedScale]:
    """Has the tapes of this thread scale by a number, and tell no optimizer."""
    fixed = FixedScale(factor)
    with replaced(HERE, fixed=fixed):
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
    variables = [s for s in flat if isinstance(s, keras.Variable | tf.Variable)]
    fixed, scales, is_tried = HERE.fixed, list[Any](), False
    if all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in tf.nest.flatten(target)
    ):
        if fixed is not None:
            scales = [fixed.factor] * (bool(variables) and not fixed.is_by_hand)
        elif variables:
            scales = _scales_of(variables)
        else:
            is_tried = _may_be_tried(self)
            scale = _NESTED_SCALE if hooks.is_recording() else _MAX_HALF_SCALE
            scales = [scale] * is_tried
    call = _TapeCall(is_scaled=bool(scales))

    def compute(targets: list[Any], seeds: Any) -> list[Any]:
        return original(self, targets, flat, seeds, unconnected_gradients)

    with replaced(HERE, call=call), hooks.asked(self):
        if not scales:
            found = original(
                self, target, sources, output_gradients, unconnected_gradients
            )
        else:
            given = _scaled(call, scales, compute, target, flat, output_gradients)
            if is_tried:
                given = _or_plain(given, flat, compute, target, output_gradients)
            found = tf.nest.pack_sequence_as(sources, given)
    if variables and fixed is None:
        _note(variables, [g for g in tf.nest.flatten(found) if g is not None], call)
    return found


def _may_be_tried(tape: tf.GradientTape) -> bool:
    """Returns whether a gradient of inputs is scaled, as for a saliency map.

    Nobody lowers that scale: where it makes gradients overflow they are computed
    without. A branch of one replica cannot wait for the others.
    """
    return (
        bool(CALLS.float16_layers)
        and hooks.can_be_asked_again(tape)
        and tf.distribute.get_strategy().num_replicas_in_sync == 1
    )


def _scaled(
    call: _TapeCall,
    scales: Sequence[Any],
    compute: _Compute,
    target: Any,
    sources: Sequence[Any],
    seeds: Any,
) -> list[Any]:
    """Returns the gradients of a call that is scaled by the least of possible scales.

    They are in float32 for variables, and true, or scaled by the code's own scale where
    it scaled its loss.
    """
    targets = tf.nest.flatten(target)
    possible = [tf.convert_to_tensor(scale) for scale in scales]
    if any(each.dtype in HALF for each in targets):
        possible.append(tf.constant(_MAX_HALF_SCALE))
    factor = possible[0] if len(possible) == 1 else tf.reduce_min(tf.stack(possible))
    given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
    scaled_seeds = [
        (tf.ones_like(each) if seed is None else tf.convert_to_tensor(seed))
        * tf.cast(factor, each.dtype)
        for each, seed in zip(targets, given, strict=True)
    ]
    found = compute(targets, scaled_seeds)
    divided = (call.by_hand[0] if call.by_hand else 1) / factor
    return [_like(s, g, divided) for s, g in zip(sources, found, strict=True)]


def _like(source: Any, gradient: Any, factor: Any) -> Any:
    """Returns a gradient times a factor, in the dtype that the code expects."""
    if gradient is None:
        return None
    true = multiplied(gradient, factor)
    if isinstance(source, keras.Variable | tf.Variable) or true.dtype == gradient.dtype:
        return true
    # The code around it may combine it with the source, as without a scale.
    return tf.cast(true, gradient.dtype)


def _or_plain(
    true: list[Any], sources: list[Any], compute: _Compute, target: Any, seeds: Any
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed."""
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def plain() -> list[tf.Tensor]:
        found = compute(tf.nest.flatten(target), seeds)
        return [tf.convert_to_tensor(_like(sources[i], found[i], 1.0)) for i in known]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = dict(zip(known, tf.cond(is_finite, lambda: dense, plain), strict=True))
    return [chosen.get(i) for i in range(len(true))]


# Held by every optimizer that scales losses, and by all that may need one.
TAPE_HOOKS = PatchSet(hooks.tape_patches(_wrap_gradient))
