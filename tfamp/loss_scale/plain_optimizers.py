"""Knows the optimizers without a loss scale, and which of them were given one.

A loop of one's own hands gradients to an optimizer that no `compile` ever saw. Where
they are of a float16 layer, the optimizer gets a companion: a `LossScaleOptimizer`
around it that tapes and `apply` go by. The optimizer stays the user's object. Where
nothing scales gradients that need it, a warning says so.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import CALLS, record_of
from tfamp.keras_hooks.optimizers import leaves, strategy_of, trained_by
from tfamp.records import checks

_ATTRIBUTE = "_tfamp_companion"
# What code of a method has to name to come to the `apply` of the base class.
_WAYS_TO_APPLY = frozenset(("apply", "apply_gradients"))
# Gradients may have been scaled by hand, as in a test of an optimizer; a loop that
# goes on like this has forgotten it.
_EAGER_STEPS = 10

_met: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_applies: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


_ids: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def ids_of(optimizer: Any) -> frozenset[int]:
    """Returns the identities of what an optimizer trains, as a tape may be asked."""
    if not optimizer.built:
        return frozenset()
    if optimizer not in _ids:
        _ids[optimizer] = identities(trained_by(optimizer))
    return _ids[optimizer]


def identities(variables: Sequence[Any]) -> frozenset[int]:
    """Returns the identities of variables, as a tape may be asked for them."""
    return frozenset(map(id, as_asked(variables)))


def as_asked(variables: Sequence[Any]) -> list[Any]:
    """Returns variables, and what holds their values, as a tape may be asked."""
    both = (x for v in variables for x in (v, getattr(v, "value", v)))
    return [x for x in both if not callable(x)]


class Here(threading.local):
    """What this thread is doing."""

    is_updating = False  # an inner optimizer makes its update
    entry = "apply"  # by what gradients come in: "apply", "pairs" or "inner"


HERE = Here()


class _Held:
    """Holds an optimizer's companion, where Keras looks for no state to save.

    It is an attribute of the optimizer, which the companion holds: both go together.
    """

    def __init__(self, companion: Any) -> None:
        self.companion = companion
        self.was_used = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Held":
        """A copied optimizer is given another one where it needs it."""
        return _Held(None)


class PlainOptimizers:
    """The optimizers that are no `LossScaleOptimizer`, as they are met.

    `make` makes a companion for an optimizer under settings.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left_alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._wrappers: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        self.make: Callable[[Any, Any], Any] | None = None

    def know(self, optimizer: Any) -> None:
        """Notes that an optimizer exists."""
        with self._lock:
            self._known.add(optimizer)

    def note_compiled(self, optimizer: Any) -> None:
        """Notes that `compile` made a wrapper, so that a loop hardly knows of it."""
        with self._lock:
            self._compiled.add(optimizer)

    def is_free(self, optimizer: Any) -> bool:
        """Returns whether an optimizer is in the hands of a loop, as far as known."""
        with self._lock:
            return optimizer not in self._compiled

    def leave_alone(self, optimizer: Any) -> None:
        """Notes that an optimizer shall have no loss scale."""
        with self._lock:
            self._left_alone.add(optimizer)

    def is_left_alone(self, ids: frozenset[int]) -> bool:
        """Returns whether one that shall have no loss scale trains a variable.

        In a `train_step` it may be one that is not built yet.
        """
        with self._lock:
            left_alone = tuple(self._left_alone)
        return any(
            (CALLS.is_training and not o.built) or not ids.isdisjoint(ids_of(o))
            for o in left_alone
        )

    def note_wrapped(self, wrapper: Any) -> None:
        """Notes that an optimizer has a loss scale as long as its wrapper lives."""
        with self._lock:
            for leaf in leaves(wrapper.inner_optimizer):
                self._wrappers[leaf] = weakref.ref(wrapper)

    def wrapper_of(self, optimizer: Any) -> Any:
        """Returns the wrapper of ours around an optimizer, None where it has none."""
        with self._lock:
            reference = self._wrappers.get(optimizer)
        found: Any = None if reference is None else reference()
        is_ours = hasattr(type(found), "last_step_skipped")
        return found if is_ours and found.inner_optimizer is optimizer else None

    def candidates(self, ids: frozenset[int]) -> tuple[list[Any], list[Any]]:
        """Returns the optimizers that may apply gradients and may be given a scale.

        First those that are built for any of the variables of the identities `ids`,
        then those that are not built, where the former do not train them all.
        """
        with self._lock:
            known = tuple(self._known)
            possible = [o for o in known if self.may_be_given(o)]
        for other in set(known).difference(possible):
            ids -= ids_of(other)
        owners = [o for o in possible if not ids.isdisjoint(ids_of(o))]
        if not ids.difference(*map(ids_of, owners)):
            return owners, []
        return owners, [o for o in possible if not o.built]

    def companion_of(self, optimizer: Any) -> Any:
        """Returns what an optimizer was given, None where it has no use for it."""
        held = vars(optimizer).get(_ATTRIBUTE)
        if held is None or held.companion is None:
            return None
        return held.companion if self.may_be_given(optimizer) else None

    def given(self, optimizer: Any, settings: Any) -> Any:
        """Returns the companion of an optimizer, made where there is none.

        The settings are those of the layer whose gradients it may apply.
        """
        with self._lock:
            if self.companion_of(optimizer) is None and self.make is not None:
                # Outside of the function that is being traced, which it outlives.
                with tf.init_scope(), _scope_of(optimizer):
                    companion = self.make(optimizer, settings)
                vars(optimizer)[_ATTRIBUTE] = _Held(companion)
            return self.companion_of(optimizer)

    def given_to(self, optimizers: Sequence[Any], settings: Any) -> list[Any]:
        """Returns the companions of optimizers that may be given one."""
        given = [self.given(optimizer, settings) for optimizer in optimizers]
        return [companion for companion in given if companion is not None]

    def is_first_use(self, optimizer: Any) -> bool:
        """Returns whether this is the first time that a companion is used."""
        held = vars(optimizer)[_ATTRIBUTE]
        before, held.was_used = held.was_used, True
        return not before

    def may_be_given(self, optimizer: Any) -> bool:
        """Returns whether an optimizer may be given a loss scale."""
        with self._lock:
            wrapper = self._wrappers.get(optimizer)
            return (
                optimizer not in self._left_alone
                and (wrapper is None or wrapper() is None)
                and getattr(optimizer, "loss_scale_factor", None) is None
                and leaves(optimizer) == [optimizer]
                and _is_of_this_strategy(optimizer)
                and (optimizer.built or _comes_to_apply(type(optimizer)))
            )


PLAIN = PlainOptimizers()


def _scope_of(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    strategy = strategy_of(optimizer)
    is_present = strategy is tf.distribute.get_strategy()
    return contextlib.nullcontext() if is_present else strategy.scope()


def _is_of_this_strategy(optimizer: Any) -> bool:
    strategy = tf.distribute.get_strategy()
    return strategy.num_replicas_in_sync == 1 or strategy_of(optimizer) is strategy


def _comes_to_apply(cls: type) -> bool:
    """Returns whether a class that is not built yet will call the base's `apply`.

    One that updates variables in an `apply` of its own would never be asked whether
    gradients are finite, and the scale may make them overflow.
    """
    base = keras.optimizers.Optimizer
    return all(
        getattr(cls, name) is getattr(base, name) or _names_a_way(getattr(cls, name))
        for name in _WAYS_TO_APPLY
    )


def _names_a_way(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    names: Sequence[str] = () if code is None else code.co_names
    return not _WAYS_TO_APPLY.isdisjoint(names)


def warn_of_unscaled_loss(optimizer: Any) -> None:
    """Warns once where gradients of unknown origin are taken for scaled ones."""
    has_no_scale = not optimizer.dynamic and optimizer.initial_scale == 1
    if optimizer.has_scaled_loss or has_no_scale:
        return
    count = _applies.get(optimizer, 0) + 1
    _applies[optimizer] = count
    is_sure = not tf.executing_eagerly() or count == _EAGER_STEPS
    if count > _EAGER_STEPS or not is_sure:
        return
    _applies[optimizer] = _EAGER_STEPS
    warnings.warn(
        f"Optimizer {optimizer.name!r} divides gradients by its loss scale, but they "
        "come from no `tf.GradientTape`, and no loss was multiplied by it: updates are "
        "too small by that factor. Compute them by a tape, or put `loss = "
        "optimizer.scale_loss(loss)` before they are computed. "
        f"{checks.see('failures/tiny-updates')}",
        UserWarning,
        stacklevel=checks.level_of_user(),
    )


def float16_layer_of(sources: Sequence[Any], *, is_part: bool = False) -> Any:
    """Returns the layer called last here of which weights in float16 are asked for.

    Where it `is_part`, other weights of a layer that has some in float16 will do.
    """
    # A variable of TensorFlow has a method of the name by which Keras's hold theirs.
    values = [getattr(source, "value", source) for source in sources]
    pairs = zip(values, sources, strict=True)
    asked = {id(source if callable(value) else value) for value, source in pairs}
    for reference in reversed(CALLS.float16_layers):
        layer = reference()
        if layer is not None and record_of(layer) is not None:
            low = [
                weight
                for _, part, _ in structure.walk(layer)
                if is_part or part.compute_dtype == "float16"
                for weight in structure.own_weights(part)
            ]
            if not asked.isdisjoint(id(weight.value) for weight in low):
                return layer
    return None


def warn_of_no_scale(layer: Any) -> None:
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
