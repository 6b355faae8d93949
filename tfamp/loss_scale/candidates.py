"""Who may apply the gradients of a loop: the optimizers that live, and who wraps them.

A loop of one's own hands gradients to an optimizer that no `compile` ever saw. Of one
that has taken a step the variables know; ahead of its first step it may be any that
waits.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks.optimizers import leaves, strategy_of, trained_by
from tfamp.keras_hooks.variables import stored
from tfamp.loss_scale.rule import DEFAULT_SCALE
from tfamp.loss_scale.scales import scale_of

_COMPANION, _WRAPPER = "_tfamp_companion", "_tfamp_wrapper"
# What code of a method has to name to come to the `apply` of the base class.
_WAYS_TO_APPLY = frozenset(("apply", "apply_gradients"))

_LOCK = threading.RLock()
KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()
_left_alone: weakref.WeakSet[Any] = weakref.WeakSet()
# Wrappers of Keras in whose place one of ours applies, and that one.
_replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def know(optimizer: Any) -> None:
    """Notes that an optimizer exists, and what it wraps."""
    with _LOCK:
        KNOWN.add(optimizer)
    inner = vars(optimizer).get("inner_optimizer")
    if is_wrapper(optimizer) and inner is not None:
        for leaf in leaves(inner):
            vars(leaf)[_WRAPPER] = weakref.ref(optimizer)


def is_wrapper(optimizer: Any) -> bool:
    """Returns whether an optimizer scales losses for another one."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def is_ours(optimizer: Any) -> bool:
    """Returns whether an optimizer is a `LossScaleOptimizer` of tfamp."""
    return hasattr(type(optimizer), "last_step_skipped")


def leave_alone(optimizer: Any) -> None:
    """Notes that an optimizer shall have no loss scale."""
    with _LOCK:
        _left_alone.add(optimizer)


def replace(stock: Any, ours: Any) -> None:
    """Has a wrapper of Keras be another name of ours, which holds what it wraps."""
    with _LOCK:
        _replaced[stock] = ours
    # What programs log.
    own = {name: getattr(ours, name) for name in ("dynamic_scale", "step_counter")}
    vars(stock).update(own)


def replacement_of(stock: Any) -> Any:
    """Returns what took the place of a wrapper of Keras, None where nothing did."""
    return _replaced.get(stock)


def wrapper_of(optimizer: Any) -> Any:
    """Returns the wrapper of ours around an optimizer, None where it has none."""
    found = _wrapper(optimizer)
    has_it = is_ours(found) and found.inner_optimizer is optimizer
    return found if has_it and optimizer not in _left_alone else None


def _wrapper(optimizer: Any) -> Any:
    reference = vars(optimizer).get(_WRAPPER)
    found = None if reference is None else reference()
    is_around = found is not None and optimizer in leaves(found.inner_optimizer)
    return found if is_around else None


def companion_of(optimizer: Any) -> Any:
    """Returns the wrapper that a loop's optimizer was given, None where it has none."""
    held = vars(optimizer).get(_COMPANION)
    found = wrapper_of(optimizer)
    return found if held is not None and held() is found else None


def give_companion(optimizer: Any, companion: Any) -> None:
    """Gives an optimizer a scale of its own, for as long as it lives."""
    # Where Keras looks for no state to save; it holds the optimizer: both go together.
    vars(optimizer)[_COMPANION] = lambda: companion


def may_be_given(optimizer: Any) -> bool:
    """Returns whether an optimizer may be given a loss scale."""
    return (
        not is_wrapper(optimizer)
        and optimizer not in _left_alone
        and _wrapper(optimizer) is None
        and getattr(optimizer, "loss_scale_factor", None) is None
        and leaves(optimizer) == [optimizer]
        and _is_of_this_strategy(optimizer)
        and (optimizer.built or _comes_to_apply(type(optimizer)))
    )


def wrappers_built_for(variables: Sequence[Any]) -> list[Any]:
    """Returns the wrappers of Keras that are built for any of these variables."""
    with _LOCK:
        known = [
            o for o in KNOWN if is_wrapper(o) and not is_ours(o) and o not in _replaced
        ]
    return [o for o in known if _trains(o.inner_optimizer, variables)]


def waiting(given: Sequence[Any], settings: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the scales of optimizers that may take their first step on variables.

    They are those of `given`, or else all that live; `settings` say what those start
    with that are no wrappers.
    """
    with _LOCK:
        known = given or tuple(KNOWN)
    possible = [
        o for o in known if o not in _replaced and (is_wrapper(o) or may_be_given(o))
    ]
    built = [o for o in possible if _trains(o, variables)]
    others = built or [o for o in possible if not o.built]
    return [_start_of(optimizer, settings) for optimizer in others]


def _trains(optimizer: Any, variables: Sequence[Any]) -> bool:
    if not optimizer.built:
        return False
    ids = {id(stored(variable)) for variable in variables}
    return not ids.isdisjoint(id(stored(v)) for v in trained_by(optimizer))


def _start_of(optimizer: Any, settings: Any) -> Any:
    if is_wrapper(optimizer):
        return scale_of(optimizer)
    if settings.loss_scale != "dynamic":
        return float(settings.loss_scale)
    return float(settings.loss_scale_options.get("initial_scale", DEFAULT_SCALE))


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
