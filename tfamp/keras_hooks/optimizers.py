"""What the loss scale and recovery need of optimizers' insides, of tapes and of XLA.

Relies on: TensorFlow optimizers reducing gradients in `_all_reduce_sum_gradients` and
clipping them in `_clip_gradients`, both looked up on the instance; Keras naming a class
in saved files by a table of its public names; `_walk_saveable` visiting the attributes
of an optimizer that are saveables themselves; `_trainable_variables`, `_iterations`,
`_learning_rate` and `_distribution_strategy` of an optimizer. A `tf.GradientTape`
deciding by `_persistent` as it is entered whether it can be asked again; one that
cannot letting go of `_tape` at its first `gradient`, and of its place on the stack of
tapes by `_pop_tape`; `record.could_possibly_record` telling whether any tape of the
thread records.
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

from tfamp.keras_hooks.layers import FLOAT16
from tfamp.keras_hooks.patches import Function, Patch, wrapper


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


def count_updates(optimizer: Any) -> None:
    """Has an optimizer that accumulates count updates: Keras counts microbatches."""
    counter = optimizer._iterations
    counter.assign(counter // optimizer.gradient_accumulation_steps)


def rate_or_schedule(optimizer: Any) -> Any:
    """Returns what a learning rate was set to; the getter gives the present rate."""
    return optimizer._learning_rate


@contextlib.contextmanager
def with_own(
    optimizers: Sequence[Any], **methods: Callable[..., Any]
) -> Iterator[None]:
    """Gives optimizers methods of their own inside the block.

    Each is made of the optimizer by a function.
    """
    made = [{k: make(each) for k, make in methods.items()} for each in optimizers]
    try:
        for each, own in zip(optimizers, made, strict=True):
            vars(each).update(own)
        yield
    finally:
        for each in optimizers:
            for name in methods:
                vars(each).pop(name, None)


def on_reduced_gradients(
    optimizer: Any, *, clips: bool
) -> contextlib.AbstractContextManager[None]:
    """Makes `optimizer.apply` take gradients that are reduced over replicas.

    `clips` says whether the optimizer clips the gradients itself.
    """
    names = ["_all_reduce_sum_gradients", *([] if clips else ["_clip_gradients"])]
    return with_own(leaves(optimizer), **{name: lambda _: list for name in names})


def updating_only_if(
    optimizers: Sequence[Any], condition_of: Callable[[Any], tf.Tensor | None]
) -> contextlib.AbstractContextManager[None]:
    """Makes an update of a variable and its slots count only on its own condition.

    `condition_of` gives it for a variable, or its part on one replica; None for always.
    """

    def update_step(optimizer: Any) -> Callable[..., None]:
        original = optimizer.update_step

        def update(gradient: Any, variable: Any, *args: Any) -> None:
            def branch() -> tf.Tensor:
                original(gradient, variable, *args)
                return tf.constant(0)

            condition = condition_of(variable)
            if condition is None:
                branch()
            else:
                tf.cond(condition, branch, lambda: tf.constant(0))

        return update

    def weight_decay(optimizer: Any) -> Callable[..., None]:
        original, rate = optimizer._apply_weight_decay, optimizer.weight_decay

        def decay(variables: Sequence[Any]) -> None:
            for variable in variables if rate is not None else ():
                condition = condition_of(variable)
                if condition is not None:
                    vars(optimizer)["weight_decay"] = tf.where(condition, rate, 0.0)
                original([variable])
                vars(optimizer)["weight_decay"] = rate

        return decay

    return with_own(
        optimizers, update_step=update_step, _apply_weight_decay=weight_decay
    )


def optimizers_of(model: keras.layers.Layer) -> list[Any]:
    """Returns a model's optimizers: attributes, and entries of lists, tuples, dicts.

    Each comes once, that of `compile` first where there is one. Sublayers are not
    searched.
    """
    found = [getattr(model, "optimizer", None)]
    for value in _attributes(model).values():
        found += _entries(value).values()
    kept = [o for o in found if isinstance(o, keras.optimizers.Optimizer)]
    return list({id(o): o for o in kept}.values())


def replace_optimizers(
    model: keras.layers.Layer, change: Callable[[Any], Any]
) -> list[str]:
    """Puts `change(optimizer)` in the place of each optimizer but that of `compile`.

    One object in several places is replaced by one. Returns the names of the attributes
    that were changed.
    """
    # TensorFlow keeps it once more, among what a checkpoint depends on.
    compiled = getattr(model, "optimizer", None)
    others = [o for o in optimizers_of(model) if o is not compiled]
    wanted = {id(o): change(o) for o in others}
    names = []
    for name, value in _attributes(model).items():
        entries = _entries(value)
        new = {k: wanted.get(id(v), v) for k, v in entries.items()}
        if all(new[k] is v for k, v in entries.items()):
            continue
        names.append(name)
        if isinstance(value, keras.optimizers.Optimizer):
            setattr(model, name, new[None])
        elif isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)  # of named tuples
            setattr(model, name, make(new.values()))
        else:
            for key, entry in new.items():
                value[key] = entry
    return names


def _attributes(model: keras.layers.Layer) -> dict[str, Any]:
    """Returns the attributes that may hold optimizers, but for that of `compile`."""
    own = ("optimizer", "_optimizer", "_tracked")
    return {name: value for name, value in vars(model).items() if name not in own}


def _entries(value: Any) -> dict[Any, Any]:
    """Returns what may be optimizers in an attribute, by their keys."""
    if isinstance(value, keras.optimizers.Optimizer):
        return {None: value}
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, dict) else {}


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
        self.name, self._own_variables, self._take_own = name, variables, take

    def _obj_type(self) -> str:
        return "Optimizer"

    def save_own_variables(self, store: Any) -> None:
        """Puts every variable into `store`, by name."""
        for name, variable in self._own_variables().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Hands all that `store` has to the optimizer."""
        self._take_own({name: store[name][()] for name in store.keys()})


def save_under_stock_name(cls: type, stock: type) -> None:
    """Lets saved files name `stock` where they mean `cls`, a subclass of it."""
    names = api_export.REGISTERED_OBJS_TO_NAMES
    names[cls] = names[stock]


def from_config_patch(is_ours: Callable[[dict[str, Any]], bool], ours: Any) -> Patch:
    """Returns the patch that turns configurations that `ours` wrote into that class."""

    def wrap(original: Any) -> Any:
        def from_config(
            cls: type, config: dict[str, Any], custom_objects: Any = None
        ) -> Any:
            if cls is keras.optimizers.LossScaleOptimizer and is_ours(config):
                return ours.from_config(config, custom_objects)
            return original.__func__(cls, config, custom_objects)

        return classmethod(from_config)

    return Patch(keras.optimizers.LossScaleOptimizer, "from_config", wrap)


_ONCE = "_tfamp_asked_once"
_WATCHES = "_tfamp_watches_in"


def tape_patches(wrap_gradient: Callable[[Callable[..., Any]], Any]) -> list[Patch]:
    """Returns the patches on a tape; `wrap_gradient` makes the new `gradient`."""

    @wrapper
    def wrap_watch(original: Function, self: Any, tensor: Any) -> None:
        # Asked for the gradient of an input: before anything is recorded it can
        # still become one that can be asked again. Others stay as they are, as they
        # would need more memory.
        is_empty = not (self._persistent or self.watched_variables())
        if FLOAT16 and is_empty and self._recording:
            self._pop_tape()
            self._tape, self._persistent = None, True
            setattr(self, _ONCE, True)
            self._push_tape()
        setattr(self, _WATCHES, _graph())
        original(self, tensor)

    return [
        Patch(tf.GradientTape, "watch", wrap_watch),
        Patch(tf.GradientTape, "gradient", wrap_gradient),
    ]


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_recording() -> bool:
    """Returns whether any gradient tape of this thread records."""
    return bool(record.could_possibly_record())


def can_be_asked_again(tape: tf.GradientTape) -> bool:
    """Returns whether more than one gradient can be computed inside `asked`.

    Of a tape that was told what to watch, in this very function: a jacobian asks for
    its gradients in another one.
    """
    return bool(tape._persistent) and getattr(tape, _WATCHES, _ONCE) is _graph()


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
