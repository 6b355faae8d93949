"""Snapshots: the bits of all that training writes, taken from a model and put back.

Variables are held under names that another process finds too: by their order, since
Keras numbers its layers through the life of a process.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure, trainer
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.loss_scale.state import ScaleVariables

# What a name begins with, by what the variable holds.
WEIGHTS, OPTIMIZER, METRICS, RECORD = "weights", "optimizer", "metrics", "record"
PLAIN = "plain"  # TensorFlow's own, which Keras knows nothing of


class Named(NamedTuple):
    """A variable and what it is called; whether all replicas hold the same bits."""

    name: str
    path: str
    variable: Any
    is_shared: bool

    def parts(self, model: keras.Model) -> tuple[Any, ...]:
        """Returns the variable of each replica in this process."""
        local: Any = model.distribute_strategy.experimental_local_results
        variable = self.variable
        is_plain = isinstance(variable, tf.Variable)
        return tuple(local(variable if is_plain else variable.value))


def named_variables(model: keras.Model) -> list[Named]:
    """Returns every variable that a train step may write, each of them once.

    "weights/..." are moving statistics and states of seed generators too, "optimizer/"
    is all of each optimizer. What a `tfamp.LossScaleOptimizer` only reports is
    "record/...": it may be non-finite while nothing is wrong. "plain/..." are
    `tf.Variable`s and generators of random numbers in attributes of its layers.
    """
    found: dict[int, Named] = {}

    def add(name: str, variable: Any, is_shared: bool) -> None:
        path = getattr(variable, "path", name)
        each = Named(name, path, variable, is_shared)
        found.setdefault(id(variable), each)

    trained = {id(variable) for variable in model.trainable_variables}
    for i, variable in enumerate(model.variables):
        is_trained = id(variable) in trained
        add(f"{WEIGHTS}/{i}/{bare_name(variable.name)}", variable, is_trained)
    for number, optimizer in enumerate(optimizers_of(model)):
        stored = tally_of(optimizer)
        reported = {id(stored.levels)} if stored else set()
        for i, variable in enumerate(optimizer.variables):
            kind = RECORD if id(variable) in reported else OPTIMIZER
            add(f"{kind}/{number}/{type(optimizer).__name__}/{i}", variable, True)
    for i, variable in enumerate(model.metrics_variables):
        add(f"{METRICS}/{i}/{bare_name(variable.name)}", variable, False)
    for i, layer in enumerate(structure.layers_of(model)):
        for name, variable in _plain_variables(layer):
            add(f"{PLAIN}/{i}/{name}", variable, False)
    return list(found.values())


def _plain_variables(layer: keras.layers.Layer) -> Iterator[tuple[str, tf.Variable]]:
    """Yields TensorFlow's own variables in the attributes of a layer, by name."""
    for name, value in vars(layer).items():
        if name.startswith("_self_"):  # where TensorFlow lists all of them anew
            continue
        for i, each in enumerate(_inside(value)):
            each = each.state if isinstance(each, tf.random.Generator) else each
            held = each.variables if isinstance(each, tf.Module) else [each]
            for j, variable in enumerate(held):
                if isinstance(variable, tf.Variable) and variable.dtype != tf.string:
                    yield f"{name}/{i}/{j}", variable


def _inside(value: Any) -> list[Any]:
    """Returns what a value holds in lists and dicts, which may hold themselves."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            inside = each.values() if isinstance(each, Mapping) else each
            left += inside if isinstance(each, (Mapping, list, tuple)) else ()
    return list(found.values())


def bare_name(name: str) -> str:
    """Returns a name without the number that makes it unique: "variable_12"."""
    return re.sub(r"_\d+$", "", name)


def tally_of(optimizer: Any) -> ScaleVariables | None:
    """Returns the counters of a `tfamp.LossScaleOptimizer`, None of another one."""
    stored = getattr(optimizer, "scale_variables", None)
    return stored if isinstance(stored, ScaleVariables) else None


def was_skipped(model: keras.Model) -> bool:
    """Returns whether the last step of a `tfamp.LossScaleOptimizer` was skipped."""
    tallies = filter(None, map(tally_of, optimizers_of(model)))
    return any(tally.numbers().streak for tally in tallies)


def built_from(model: keras.Model, batch: Any) -> bool:
    """Builds what the first step would build; returns whether all is built.

    `batch` may be its spec. A model with a `train_step` of its own may give an
    optimizer some of the variables only, so it is left to build itself.
    """
    if type(model).train_step is keras.Model.train_step and batch is not None:
        # Whatever a model raises that only runs on tensors.
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            trainer.build_from(model, batch)
    return model.built and all(optimizer.built for optimizer in optimizers_of(model))


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A copy of a model's variables in the host's memory.

    `arrays` are bits by a name that is the same in another process, "weights/3/kernel";
    what differs between several replicas has one more dimension in front. `counters`
    are plain values of whoever keeps the state, `paths` are Keras's.
    """

    arrays: dict[str, np.ndarray]
    counters: dict[str, Any] = dataclasses.field(default_factory=dict)
    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    def with_counters(self, **counters: Any) -> "State":
        """Returns the same arrays, with more counters."""
        return dataclasses.replace(self, counters={**self.counters, **counters})


def take(model: keras.Model) -> State:
    """Copies every variable that training writes, to the memory of the host."""
    arrays, paths = {}, {}
    for each in named_variables(model):
        # A look at the variable's own memory on a CPU, which the copy lets go at once.
        looks = [np.asarray(tf.convert_to_tensor(part)) for part in each.parts(model)]
        is_one = each.is_shared or len(looks) == 1
        arrays[each.name] = np.array(looks[0]) if is_one else np.stack(looks)
        paths[each.name] = each.path
    return State(arrays, {}, paths)


def put(model: keras.Model, state: State, *, metrics: bool = True) -> None:
    """Gives a model the bits of a state, or raises ValueError and changes nothing."""
    with model.distribute_strategy.scope():
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and model.built:
            optimizer.build(model.trainable_variables)
    num_replicas = num_local_replicas(model)
    variables = {each.name: each for each in named_variables(model)}
    expected, given = dict[str, str](), dict[str, str]()
    for name, each in variables.items():
        front = () if each.is_shared or num_replicas == 1 else (num_replicas,)
        shape = (*front, *each.variable.shape)
        dtype = tf.as_dtype(each.variable.dtype).name
        expected[name] = f"{each.path} of shape {shape} in {dtype}"
    for name, array in state.arrays.items():
        path = variables[name].path if name in variables else state.paths.get(name)
        given[name] = f"{path} of shape {array.shape} in {array.dtype.name}"
    wrong = [n for n in {**expected, **given} if expected.get(n) != given.get(n)]
    problems = [n for n in wrong if not n.startswith((f"{METRICS}/", f"{PLAIN}/"))]
    for first in problems[:1]:
        raise ValueError(
            f"`state` is of another model than {model.name!r}: it has "
            f"{given.get(first, 'nothing')}, in the model "
            f"{expected.get(first, 'nothing')}; and {len(problems) - 1} more differ. "
            f"Expected the variables of this model on {num_replicas} replicas. Build "
            "and compile it as it was when the state was taken."
        )
    model.reset_metrics()
    for name, each in variables.items():
        if name in wrong or (name.startswith(f"{METRICS}/") and not metrics):
            continue
        parts, array = each.parts(model), state.arrays[name]
        is_one = each.is_shared or len(parts) == 1
        rows = [array] * len(parts) if is_one else list(array)
        for part, row in zip(parts, rows, strict=True):
            # A copy: TensorFlow may train on in the very memory it was given.
            part.assign(np.array(row))


def num_local_replicas(model: keras.Model) -> int:
    """Returns the number of replicas in this process, whose parts a state holds."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return 1
    return len(strategy.extended.worker_devices)


def nonfinite(state: State) -> Iterator[tuple[str, int]]:
    """Yields path and number of NaN and inf of weights, statistics and slots."""
    for name, array in state.arrays.items():
        is_counted = name.startswith((f"{WEIGHTS}/", f"{OPTIMIZER}/"))
        if is_counted and array.dtype.kind not in "biu":
            if bad := int(array.size - np.count_nonzero(np.isfinite(array))):
                yield state.paths.get(name, name), bad
