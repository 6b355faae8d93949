"""What the loss scale and recovery need of optimizers' insides, of tapes and of XLA.

Relies on: TensorFlow optimizers reducing gradients in
`_all_reduce_sum_gradients` and clipping them in `_clip_gradients`, both looked
up on the instance; Keras naming a class in
saved files by a table of its public names; `_walk_saveable` visiting the
attributes of an optimizer that are saveables themselves; `_trainable_variables`,
`_var_key`, `_iterations`, `_learning_rate` and `_distribution_strategy` of an
optimizer. A `tf.GradientTape` deciding by `_persistent` as it is entered whether it can
be asked again; one that cannot letting go of `_tape` at its first `gradient`, and of
its place on the stack of tapes by `_pop_tape`; `record.could_possibly_record` telling
whether any tape of the thread records.
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

from tfamp.keras_hooks.backend import HALF
from tfamp.keras_hooks.layers import FLOAT16
from tfamp.keras_hooks.patches import Function, HookError, Patch, wrapper


def in_xla() -> bool:
    """Returns whether a function is being traced for compilation by XLA."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables themselves in `optimizer`."""
    inner = getattr(optimizer, "optimizers", None)
    return list(inner) if isinstance(inner, list | tuple) else [optimizer]


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises ValueError where an optimizer was built for other variables."""
    optimizer._check_variables_are_known(variables)


def strategy_of(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy in whose scope an optimizer was made."""
    return optimizer._distribution_strategy


def call_counter(optimizer: Any) -> Any:
    """Returns the variable that counts calls of `apply`, microbatches among them."""
    return optimizer._iterations


def rate_or_schedule(optimizer: Any) -> Any:
    """Returns what a learning rate was set to; the getter gives the present rate."""
    return optimizer._learning_rate


@contextlib.contextmanager
def on_reduced_gradients(optimizer: Any, *, clips: bool) -> Iterator[None]:
    """Makes `optimizer.apply` take gradients that are reduced over replicas.

    `clips` says whether the optimizer clips the gradients itself.
    """
    changed = []
    try:
        for leaf in leaves(optimizer):
            own = vars(leaf)
            if not hasattr(leaf, "_all_reduce_sum_gradients"):
                raise HookError(
                    f"Found no `_all_reduce_sum_gradients` in {leaf!r}; tfamp relies "
                    "on it. Wrap an optimizer of `keras.optimizers`."
                )
            own["_all_reduce_sum_gradients"] = list
            changed.append((own, "_all_reduce_sum_gradients"))
            if not clips:
                own["_clip_gradients"] = list
                changed.append((own, "_clip_gradients"))
        yield
    finally:
        for own, name in changed:
            own.pop(name, None)


@contextlib.contextmanager
def updating_only_if(
    optimizers: Sequence[Any], condition_of: Callable[[Any], tf.Tensor | None]
) -> Iterator[None]:
    """Makes an update of a variable and its slots count only on its own condition.

    `condition_of` gives it for a variable, or its part on one replica; None for always.
    No optimizer may be inside another.
    """

    def wrap(own: dict[str, Any], update: Any, decay: Any, rate: Any) -> None:
        def update_step(gradient: Any, variable: Any, *args: Any) -> Any:
            condition = condition_of(variable)
            if condition is None:
                return update(gradient, variable, *args)

            def branch() -> tf.Tensor:
                update(gradient, variable, *args)
                return tf.constant(0)

            return tf.cond(condition, branch, lambda: tf.constant(0))

        def apply_weight_decay(variables: Sequence[Any]) -> None:
            for variable in variables:
                condition = condition_of(variable)
                if condition is not None:
                    own["weight_decay"] = tf.where(condition, rate, 0.0)
                decay([variable])
                own["weight_decay"] = rate

        own["update_step"] = update_step
        if rate is not None:
            own["_apply_weight_decay"] = apply_weight_decay

    try:
        for each in optimizers:
            update, decay = each.update_step, each._apply_weight_decay
            wrap(vars(each), update, decay, each.weight_decay)
        yield
    finally:
        for each in optimizers:
            vars(each).pop("update_step", None)
            vars(each).pop("_apply_weight_decay", None)


def optimizers_of(model: keras.layers.Layer) -> list[Any]:
    """Returns a model's optimizers: attributes, and entries of lists, tuples, dicts.

    Each comes once, that of `compile` first where there is one. Sublayers are not
    searched.
    """
    found = [getattr(model, "optimizer", None)]
    for _, value in _attributes(model):
        found += [entry for _, entry in _entries(value)]
    kept = [o for o in found if isinstance(o, keras.optimizers.Optimizer)]
    return list({id(o): o for o in kept}.values())


def replace_optimizers(
    model: keras.layers.Layer, change: Callable[[Any], Any]
) -> list[str]:
    """Puts `change(optimizer)` in the place of each optimizer but that of `compile`.

    One object in several places is replaced by one. Returns the names of the attributes
    that were changed.
    """
    given: dict[int, tuple[Any, Any]] = {}
    # TensorFlow keeps it once more, among what a checkpoint depends on.
    compiled = getattr(model, "optimizer", None)

    def wanted(present: Any) -> Any:
        if present is compiled or not isinstance(present, keras.optimizers.Optimizer):
            return present
        if id(present) not in given:
            given[id(present)] = present, change(present)
        return given[id(present)][1]

    names = []
    for name, value in _attributes(model):
        entries = _entries(value)
        changed = {k: wanted(v) for k, v in entries if wanted(v) is not v}
        if not changed:
            continue
        names.append(name)
        if isinstance(value, keras.optimizers.Optimizer):
            setattr(model, name, changed[None])
        elif isinstance(value, tuple):
            parts = [changed.get(k, v) for k, v in entries]
            make = getattr(type(value), "_make", tuple)  # of named tuples
            setattr(model, name, make(parts))
        else:
            for key, entry in changed.items():
                value[key] = entry
    return names


def _attributes(model: keras.layers.Layer) -> list[tuple[str, Any]]:
    """Returns the attributes that may hold optimizers, but for that of `compile`."""
    own = ("optimizer", "_optimizer", "_tracked")
    return [(name, value) for name, value in vars(model).items() if name not in own]


def _entries(value: Any) -> list[tuple[Any, Any]]:
    """Returns what may be optimizers in an attribute, each with its key."""
    if isinstance(value, keras.optimizers.Optimizer):
        return [(None, value)]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


class SavedBeside(KerasSaveable):
    """Variables that a saved file holds beside those of stock Keras, in a group `name`.

    An attribute of the optimizer: stock Keras passes over what it does not know when it
    loads the file. `variables` gives them by the name they are saved under; `take`
    takes the values of a file, by name.
    """

    def __init__(
        self,
        name: str,
        variables: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any]], None],
    ) -> None:
        self.name = name
        self._own_variables = variables
        self._take = take

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Puts every variable into `store`, by name."""
        for name, variable in self._own_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Hands all that `store` has to the optimizer."""
        self._take({name: store[name][()] for name in store.keys()})


def save_under_stock_name(cls: type, stock: type) -> None:
    """Lets saved files name `stock` where they mean `cls`, a subclass of it."""
    api_export.REGISTERED_OBJS_TO_NAMES[cls] = api_export.REGISTERED_OBJS_TO_NAMES[
        stock
    ]


def from_config_patch(is_ours: Callable[[dict[str, Any]], bool], ours: Any) -> Patch:
    """Returns the patch that turns configurations that `ours` wrote into that class."""

    def wrap(original: Callable[..., Any]) -> Any:
        def from_config(
            cls: type, config: dict[str, Any], custom_objects: Any = None
        ) -> Any:
            if cls is keras.optimizers.LossScaleOptimizer and is_ours(config):
                return ours.from_config(config, custom_objects)
            return original.__func__(cls, config, custom_objects)  # type: ignore[attr-defined]

        return classmethod(from_config)

    return Patch(keras.optimizers.LossScaleOptimizer, "from_config", wrap)


_ONCE = "_tfamp_asked_once"
_WATCHES = "_tfamp_watches_in"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "While", "StatelessWhile")


def tape_patches(wrap_gradient: Callable[[Callable[..., Any]], Any]) -> list[Patch]:
    """Returns the patches on a tape; `wrap_gradient` makes the new `gradient`."""

    @wrapper
    def wrap_init(
        original: Function,
        self: Any,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        # It costs no memory where a tape around keeps what this one keeps. Others, and
        # all without float16, stay as they are: loops have another gradient under
        # persistent tapes.
        once = not persistent and bool(FLOAT16) and is_recording()
        original(self, persistent or once, watch_accessed_variables)
        setattr(self, _ONCE, once)

    @wrapper
    def wrap_watch(original: Function, self: Any, tensor: Any) -> None:
        # Asked for the gradient of an input: before anything is recorded it can
        # still become one that can be asked again.
        is_empty = not (self._persistent or self.watched_variables())
        if FLOAT16 and is_empty and self._recording:
            self._pop_tape()
            if not is_recording():
                self._tape, self._persistent = None, True
                setattr(self, _ONCE, True)
            self._push_tape()
        setattr(self, _WATCHES, _graph())
        original(self, tensor)

    return [
        Patch(tf.GradientTape, "__init__", wrap_init),
        Patch(tf.GradientTape, "watch", wrap_watch),
        Patch(tf.GradientTape, "gradient", wrap_gradient),
    ]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def watches_here(tape: tf.GradientTape) -> bool:
    """Returns whether a tape was told what to watch, in this very function.

    A jacobian asks for its gradients in another one.
    """
    return getattr(tape, _WATCHES, _ONCE) is _graph()


def is_recording() -> bool:
    """Returns whether any gradient tape of this thread records."""
    return bool(record.could_possibly_record())


def can_be_asked_again(tape: tf.GradientTape) -> bool:
    """Returns whether more than one gradient can be computed inside `asked`."""
    return bool(tape._persistent)


def may_compute_in_half() -> bool:
    """Returns whether a function is being traced that may compute in half precision.

    What it calls as a function of its own is not looked into, and may.
    """
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return any(
        operation.type in _CALLS or any(t.dtype in HALF for t in operation.outputs)
        for operation in graph.get_operations()
    )


@contextlib.contextmanager
def asked(tape: tf.GradientTape) -> Iterator[None]:
    """Uses a tape up, as one that is not persistent is by its first gradient."""
    if not getattr(tape, _ONCE, False) or tape._tape is None:
        yield
        return
    if tape._recording:
        tape._pop_tape()
    yield
    tape._watched_variables = tape._tape.watched_variables()
    tape._tape, tape._persistent = None, False
