"""What the loss scale and recovery need of optimizers' insides, of tapes and of XLA.

Relies on: TensorFlow optimizers reducing gradients in `_all_reduce_sum_gradients` and
clipping them in `_clip_gradients`, both looked up on the instance; Keras naming a class
in saved files by a table of its public names; `_walk_saveable` visiting the attributes
of an optimizer that are saveables themselves; `_trainable_variables`, `_iterations`,
`_learning_rate` and `_distribution_strategy` of an optimizer. A `tf.GradientTape`
deciding by `_persistent` as it is entered whether it can be asked again; one that
cannot letting go of `_tape` at its first `gradient`, and of its place on the stack of
tapes by `_pop_tape`; `record.could_possibly_record` telling whether any tape records.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.saving.keras_saveable import KerasSaveable
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from tfamp.keras_hooks.layers import FLOAT16, SOURCE
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper

_ONCE, _WATCHES = "_tfamp_asked_once", "_tfamp_watches_in"  # of a tape


def in_xla() -> bool:
    """Returns whether a function is being traced for compilation by XLA."""
    graph = _graph()
    return graph is not None and bool(
        control_flow_util.GraphOrParentsInXlaContext(graph)
    )


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables themselves in `optimizer`."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, list | tuple) else [optimizer]


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order.

    Wrappers of older versions of Keras leave them to the optimizer inside.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    own = optimizer._trainable_variables
    return list(own or ([] if inner is None else inner._trainable_variables))


def check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises ValueError where an optimizer was built for other variables."""
    optimizer._check_variables_are_known(variables)


def strategy_of(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def scope_of(strategy: tf.distribute.Strategy) -> Any:
    """Returns where what is made or assigned arrives on all replicas of a strategy."""
    is_here = strategy is tf.distribute.get_strategy()
    is_one = strategy.num_replicas_in_sync == 1
    return contextlib.nullcontext() if is_here or is_one else strategy.scope()


def where_replicas_are_one(do: Callable[..., None], *values: Any) -> None:
    """Runs `do(*values)` once for all replicas, from wherever it is called.

    Where a strategy cannot merge its replicas, it runs on each of them.
    """
    if tf.distribute.in_cross_replica_context():
        do(*values)
    else:
        tf.__internal__.distribute.interim.maybe_merge_call(
            lambda _, *merged: do(*merged), tf.distribute.get_strategy(), *values
        )


def count_updates(optimizer: Any) -> None:
    """Has an optimizer that accumulates count updates: Keras counts microbatches."""
    counter = optimizer._iterations
    counter.assign(counter // optimizer.gradient_accumulation_steps)


def rate_or_schedule(optimizer: Any) -> Any:
    """Returns what a learning rate was set to; the getter gives the present rate."""
    return optimizer._learning_rate


@contextlib.contextmanager
def on_reduced_gradients(
    optimizer: Any,
    *,
    clips: bool,
    condition_of: Callable[[Any], tf.Tensor | None] | None = None,
) -> Iterator[None]:
    """Makes `optimizer.apply` take gradients that are reduced over replicas.

    `clips` says whether the optimizer clips the gradients itself. An update of a
    variable and its slots counts only on the condition that `condition_of` gives for
    it, or its part on one replica; None for always.
    """
    names = ["_all_reduce_sum_gradients", *([] if clips else ["_clip_gradients"])]
    with contextlib.ExitStack() as stack:
        for each in leaves(optimizer):
            own = dict[str, Any].fromkeys(names, list)
            if condition_of is not None:
                own |= _conditional(each, condition_of)
            stack.enter_context(replaced(each, **own))
        yield


def _conditional(optimizer: Any, condition_of: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the methods of an optimizer that update a variable on its condition."""
    original, decay = optimizer.update_step, optimizer._apply_weight_decay
    rate = optimizer.weight_decay

    def update_step(gradient: Any, variable: Any, *args: Any) -> None:
        def branch() -> tf.Tensor:
            original(gradient, variable, *args)
            return tf.constant(0)

        condition = condition_of(variable)
        if condition is None:
            branch()
        else:
            tf.cond(condition, branch, lambda: tf.constant(0))

    def apply_weight_decay(variables: Sequence[Any]) -> None:
        for variable in variables if rate is not None else ():
            condition = condition_of(variable)
            now = rate if condition is None else tf.where(condition, rate, 0.0)
            with replaced(optimizer, weight_decay=now):
                decay([variable])

    return {"update_step": update_step, "_apply_weight_decay": apply_weight_decay}


def optimizers_of(model: keras.layers.Layer) -> list[Any]:
    """Returns a model's optimizers: attributes, and entries of lists, tuples, dicts.

    Each comes once, that of `compile` first where there is one. Sublayers are not
    searched.
    """
    held = [getattr(model, "optimizer", None), *_attributes(model).values()]
    found = [each for value in held for each in _entries(value).values()]
    return list({id(each): each for each in found}.values())


def replace_optimizers(
    model: keras.layers.Layer, change: Callable[[Any], Any]
) -> list[str]:
    """Puts `change(optimizer)` in the place of each optimizer but that of `compile`.

    One object in several places is replaced by one. Returns the names of the attributes
    that were changed.
    """
    compiled = getattr(model, "optimizer", None)
    others = [each for each in optimizers_of(model) if each is not compiled]
    wanted = {id(each): change(each) for each in others}
    names = []
    for name, value in _attributes(model).items():
        old = _entries(value)
        new = {key: wanted.get(id(each), each) for key, each in old.items()}
        if all(new[key] is old[key] for key in old):
            continue
        if not name.startswith("_self_"):  # of TensorFlow's, for checkpoints
            names.append(name)
        if isinstance(value, list | dict):
            for key, each in new.items():
                value[key] = each
        elif isinstance(value, tuple):
            changed = (new.get(key, each) for key, each in enumerate(value))
            setattr(model, name, tuple(changed))
        else:
            setattr(model, name, new[None])
    return names


def _attributes(model: keras.layers.Layer) -> dict[str, Any]:
    """Returns the attributes that may hold optimizers, but for that of `compile`.

    TensorFlow keeps it once more, among what a checkpoint depends on.
    """
    own = ("optimizer", "_optimizer", "_tracked")
    return {name: value for name, value in vars(model).items() if name not in own}


def _entries(value: Any) -> dict[Any, Any]:
    """Returns the optimizers in an attribute, by their keys."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    entries = value if isinstance(value, dict) else {None: value}
    kind = keras.optimizers.Optimizer
    return {key: each for key, each in entries.items() if isinstance(each, kind)}


class SavedBeside(KerasSaveable):
    """What a file holds beside the variables of an optimizer, as an attribute of it.

    Stock Keras passes over what it does not know when it loads the file.
    """

    def _obj_type(self) -> str:
        return "Optimizer"


def config_patch(ours: Any, mark: str) -> Patch:
    """Returns the patch that turns configurations that `ours` wrote into that class.

    Saved files name the stock class where they mean `ours`, a subclass of it; the
    inner optimizer's configuration has a `mark`.
    """
    stock, names = ours.__mro__[1], api_export.REGISTERED_OBJS_TO_NAMES
    names[ours] = names[stock]

    def wrap(original: Any) -> Any:
        def from_config(cls: type, config: Any, custom_objects: Any = None) -> Any:
            inner = config.get("inner_optimizer")
            if cls is stock and isinstance(inner, dict) and mark in inner:
                return ours.from_config(config, custom_objects)
            return original.__func__(cls, config, custom_objects)

        return classmethod(from_config)

    return Patch(stock, "from_config", wrap)


def tape_patches(wrap_gradient: Callable[[Callable[..., Any]], Any]) -> list[Patch]:
    """Returns the patches on a tape; `wrap_gradient` makes the new `gradient`."""

    @wrapper
    def wrap_watch(original: Function, self: Any, tensor: Any) -> None:
        # Before anything is recorded a tape can still become one to be asked again.
        is_empty = not (self._persistent or self.watched_variables())
        if FLOAT16 and is_empty and self._recording:
            self._pop_tape()
            self._tape, self._persistent = None, True
            setattr(self, _ONCE, True)
            self._push_tape()
        setattr(self, _WATCHES, _graph())
        for each in tf.nest.flatten(tensor):  # which exact layers take as it is, then
            if hasattr(each, SOURCE):
                delattr(each, SOURCE)
        original(self, tensor)

    return [
        Patch(tf.GradientTape, "watch", wrap_watch),
        Patch(tf.GradientTape, "gradient", wrap_gradient),
    ]


def is_recording() -> bool:
    """Returns whether any gradient tape of this thread records."""
    return bool(record.could_possibly_record())


def in_jacobian() -> bool:
    """Returns whether what a tape computes here is vectorized, as in a jacobian."""
    return "loop_body" in tf.get_current_name_scope().split("/")


@contextlib.contextmanager
def unseen_by_functions() -> Iterator[None]:
    """Makes variables that functions being traced do not hear of, to trace once more.

    The second trace would find a tape used up.
    """
    local = tf.compat.v1.get_default_graph()._thread_local
    with replaced(local, _variable_creator_stack=[]):
        yield


@contextlib.contextmanager
def asked(tape: tf.GradientTape) -> Iterator[bool]:
    """Uses a tape up, as one that is not persistent is by its first gradient.

    Gives whether it can be asked twice inside: one that was told what to watch, in this
    very function; a jacobian asks for its gradients in another one.
    """
    is_last = getattr(tape, _ONCE, False) and tape._tape is not None
    if is_last and tape._recording:
        tape._pop_tape()
    yield bool(tape._persistent) and getattr(tape, _WATCHES, _ONCE) is _graph()
    if is_last:
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape, tape._persistent = None, False
