"""Snapshots: the bits of all that training writes, taken from a model and put back.

Variables are held under names that another process finds too. Keras numbers its layers
through the life of a process, so the second model of a notebook has "dense_3" where the
first had "dense". What stays is the order.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import trainer
from tfamp.loss_scale.counters import ScaleVariables

# What a name begins with, by what the variable holds.
WEIGHTS, OPTIMIZER, METRICS, RECORD = "weights", "optimizer", "metrics", "record"
_NUMBERED = re.compile(r"_\d+$")
_MAX_SHOWN = 3
# What a loss scale only reports, and metrics, which the logs tell of: they have no
# variables before they are used.
_LEFT_OUT = (f"{RECORD}/", f"{METRICS}/")


class Named(NamedTuple):
    """A variable and what it is called.

    It `is_shared` where all replicas hold the same bits, as they do of trained weights
    and slots; not of moving statistics or seeds.
    """

    name: str
    path: str
    variable: Any
    is_shared: bool


def named_variables(model: keras.Model) -> list[Named]:
    """Returns every variable that a train step may write, each of them once.

    Weights, moving statistics and the states of seed generators are "weights/..."; all
    of each optimizer is "optimizer/..."; metrics are "metrics/...". What a
    `tfamp.LossScaleOptimizer` only reports, such as the norm of a skipped step, is
    "record/...": it may be non-finite while nothing is wrong.
    """
    found: list[Named] = []
    trained = {id(variable) for variable in model.trainable_variables}
    for i, variable in enumerate(model.variables):
        name = f"{WEIGHTS}/{i}/{bare_name(variable.name)}"
        found.append(Named(name, variable.path, variable, id(variable) in trained))
    for number, optimizer in enumerate(optimizers_of(model)):
        kind = type(optimizer).__name__
        stored = tally_of(optimizer)
        reported = (stored.levels, stored.recent) if stored is not None else ()
        for i, variable in enumerate(optimizer.variables):
            is_reported = any(variable is each for each in reported)
            what = RECORD if is_reported else OPTIMIZER
            name = f"{what}/{number}/{kind}/{i}"
            found.append(Named(name, variable.path, variable, True))
    for i, variable in enumerate(model.metrics_variables):
        name = f"{METRICS}/{i}/{bare_name(variable.name)}"
        found.append(Named(name, variable.path, variable, False))
    seen: dict[int, Named] = {}
    for each in found:
        seen.setdefault(id(each.variable), each)
    return list(seen.values())


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers of a model: in attributes, and in lists or dicts there."""
    found = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        if isinstance(value, Mapping):
            found += value.values()
        else:
            found += value if isinstance(value, (list, tuple)) else [value]
    # By identity: a model may hold one under several names.
    optimizers = {id(o): o for o in found if isinstance(o, keras.optimizers.Optimizer)}
    return list(optimizers.values())


def tally_of(optimizer: Any) -> ScaleVariables | None:
    """Returns the counters of a `tfamp.LossScaleOptimizer`, None of another one."""
    stored = getattr(optimizer, "scale_variables", None)
    return stored if isinstance(stored, ScaleVariables) else None


def was_skipped(model: keras.Model) -> bool:
    """Returns whether the last step of a `tfamp.LossScaleOptimizer` was skipped."""
    tallies = [tally_of(optimizer) for optimizer in optimizers_of(model)]
    return any(t is not None and t.numbers().streak for t in tallies)


def built_from(model: keras.Model, element_spec: Any) -> bool:
    """Builds what the first step would build, so that a snapshot has all variables.

    Returns whether the model and its optimizers are built now. A model with a
    `train_step` of its own may give an optimizer some of the variables only, so it is
    left to build itself. The element spec of a batch is None where it is not known.
    """
    optimizers = optimizers_of(model)
    if type(model).train_step is keras.Model.train_step and element_spec is not None:
        strategy = model.distribute_strategy
        # Whatever a model raises that only runs on tensors.
        with contextlib.suppress(Exception), strategy.scope():
            if not model.built:
                trainer.build_from(model, element_spec)
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
    return model.built and all(optimizer.built for optimizer in optimizers)


def bare_name(name: str) -> str:
    """Returns a name without the number that makes it unique.

    Example:
        >>> bare_name("seed_generator_state"), bare_name("variable_12")
        ('seed_generator_state', 'variable')
    """
    return _NUMBERED.sub("", name)


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """A copy of a model's variables in the host's memory.

    Attributes:
        arrays: For each variable its bits, by a name that is the same in another
            process that builds the same model, "weights/3/kernel". What differs
            between replicas, such as moving statistics, has one more dimension in
            front, where there are several.
        counters: Plain numbers: "iterations", and with a loss scale "loss_scale",
            "applied_steps", "skipped_steps", "consecutive_skips". Whoever keeps the
            state may add some.
        paths: For each name the path that Keras gave the variable.
    """

    arrays: dict[str, np.ndarray]
    counters: dict[str, Any]
    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def with_counters(self, **counters: Any) -> "State":
        """Returns the same arrays, with more counters."""
        return dataclasses.replace(self, counters={**self.counters, **counters})


def take(model: keras.Model, *, into: State | None = None) -> State:
    """Copies every variable that training writes.

    Weights, moving statistics, states of seed generators, metrics, and all of every
    optimizer: slots, averages, accumulators, loss scale and counters. One copy of
    memory a variable, and nothing is copied on the device.

    Not in it: what a model keeps outside of Keras variables, and Python's and NumPy's
    random generators.
    """
    spare = into.arrays if into is not None else {}
    strategy = model.distribute_strategy
    arrays, paths = {}, {}
    for named in named_variables(model):
        parts = strategy.experimental_local_results(named.variable.value)
        # A look at the variable's own memory on a CPU, which the copy lets go at once.
        looks = [np.asarray(tf.convert_to_tensor(part)) for part in parts]
        shape, dtype = looks[0].shape, looks[0].dtype
        if len(looks) > 1 and not named.is_shared:
            shape = (len(looks), *shape)
        else:
            looks = looks[:1]
        held = spare.get(named.name)
        if held is None or held.shape != shape or held.dtype != dtype:
            held = np.empty(shape, dtype)
        for target, look in zip(_rows(held, len(looks)), looks, strict=True):
            np.copyto(target, look)
        arrays[named.name], paths[named.name] = held, named.path
    return State(arrays, _counters(model), paths)


def put(model: keras.Model, state: State, *, metrics: bool = True) -> None:
    """Gives a model the bits of a state.

    Raises:
        ValueError: The state is of another model; nothing was changed.
    """
    strategy = model.distribute_strategy
    with strategy.scope():
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and model.built:
            optimizer.build(model.trainable_variables)
    variables = named_variables(model)
    kept = [each for each in variables if not each.name.startswith(f"{METRICS}/")]
    num_local = num_local_replicas(model)
    _check(model, state, kept, num_local)
    measured = [
        each
        for each in variables
        if metrics
        and each.name.startswith(f"{METRICS}/")
        and _fits(each, state, num_local)
    ]
    model.reset_metrics()
    for each in kept + measured:
        parts = strategy.experimental_local_results(each.variable.value)
        array = state.arrays[each.name]
        is_split = len(parts) > 1 and not each.is_shared
        rows = _rows(array, len(parts)) if is_split else [array] * len(parts)
        for part, row in zip(parts, rows, strict=True):
            # A copy: TensorFlow may train on in the very memory it was given.
            part.assign(np.array(row))


def num_local_replicas(model: keras.Model) -> int:
    """Returns the number of replicas in this process, whose parts a state holds."""
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return 1
    return len(strategy.extended.worker_devices)


def num_nonfinite(state: State) -> int:
    """Returns how many numbers of weights, statistics and slots are NaN or inf.

    Metrics don't count, nor what a loss scale reports.
    """
    return sum(_num_nonfinite(array) for _, array in _judged(state))


def first_nonfinite(state: State) -> str | None:
    """Returns the path of the first variable with a NaN or inf, None without any."""
    for name, array in _judged(state):
        if _num_nonfinite(array):
            return state.paths.get(name, name)
    return None


def digest(state: State) -> str:
    """Returns a checksum of weights, statistics, seeds, slots and counters.

    One NaN is as good as another: which bits a NaN has is not the model's doing.
    """
    total = hashlib.sha256()
    for name in sorted(state.arrays):
        if name.startswith(_LEFT_OUT):
            continue
        array = np.ascontiguousarray(state.arrays[name])
        total.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        total.update(_one_nan(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _rows(array: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Returns views of the parts of an array that replicas hold."""
    return [array] if num_parts == 1 else [array[i, ...] for i in range(num_parts)]


def _judged(state: State) -> list[tuple[str, np.ndarray]]:
    kinds = (f"{WEIGHTS}/", f"{OPTIMIZER}/")
    return [item for item in state.arrays.items() if item[0].startswith(kinds)]


def _num_nonfinite(array: np.ndarray) -> int:
    if array.dtype.kind in "biu" or not array.size:
        return 0
    if array.dtype.itemsize > 2:
        # One pass over the memory; what is non-finite somewhere is so in the sum.
        with np.errstate(all="ignore"):
            if np.isfinite(array.sum()):
                return 0
    return int(array.size - np.count_nonzero(np.isfinite(array)))


def _counters(model: keras.Model) -> dict[str, Any]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return {}
    counters: dict[str, Any] = {"iterations": int(optimizer.iterations.numpy())}
    tally = tally_of(optimizer)
    if tally is not None:
        now = tally.numbers()
        counters["loss_scale"] = now.scale
        counters["applied_steps"] = now.applied
        counters["skipped_steps"] = now.skipped
        counters["consecutive_skips"] = now.streak
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        counters["loss_scale"] = float(optimizer.dynamic_scale.numpy())
    return counters


def _shape(each: Named, num_replicas: int) -> tuple[int, ...]:
    shape = tuple(each.variable.shape)
    return shape if each.is_shared or num_replicas == 1 else (num_replicas, *shape)


def _fits(each: Named, state: State, num_replicas: int) -> bool:
    array = state.arrays.get(each.name)
    return array is not None and array.shape == _shape(each, num_replicas)


def _check(
    model: keras.Model, state: State, kept: list[Named], num_replicas: int
) -> None:
    """Raises where a state is none of this model."""
    expected = {each.name: each for each in kept}
    given: Mapping[str, np.ndarray] = {
        name: array
        for name, array in state.arrays.items()
        if not name.startswith(f"{METRICS}/")
    }
    problems = [f"lacks {n} ({expected[n].path})" for n in expected if n not in given]
    problems += [
        f"has {name} ({state.paths.get(name, '?')}), which the model lacks"
        for name in given
        if name not in expected
    ]
    for name, array in given.items():
        if name not in expected:
            continue
        each = expected[name]
        shape, dtype = _shape(each, num_replicas), each.variable.dtype
        if array.shape != shape or array.dtype.name != dtype:
            problems.append(
                f"has {name} ({each.path}) of shape {array.shape} in "
                f"{array.dtype.name}, the model's is {shape} in {dtype}"
            )
    if problems:
        more = len(problems) - _MAX_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ValueError(
            f"`state` is of another model than {model.name!r}: it "
            f"{'; it '.join(problems[:_MAX_SHOWN])}{rest}. Expected the variables of "
            f"this model on {num_replicas} replicas. Build and compile the model as it "
            "was when the state was taken."
        )


def _one_nan(array: np.ndarray) -> np.ndarray:
    """Returns an array whose NaNs have all the same bits."""
    if array.dtype.kind in "biuOSU":
        return array
    is_nan = np.isnan(array)
    if not is_nan.any():
        return array
    plain = array.copy()
    plain[is_nan] = np.nan
    return plain
