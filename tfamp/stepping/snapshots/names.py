"""The variables that training writes, under names that another process finds too.

Keras numbers its layers through the life of a process, so the second model of a
notebook has "dense_3" where the first had "dense". What stays is the order.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras

from tfamp.loss_scale.counters import ScaleVariables

# What a name begins with, by what the variable holds.
WEIGHTS, OPTIMIZER, METRICS, RECORD = "weights", "optimizer", "metrics", "record"
_NUMBERED = re.compile(r"_\d+$")


class Named(NamedTuple):
    """A variable and what it is called.

    It `is_shared` where all replicas hold the same bits, as they do of trained weights
    and slots; not of moving statistics or seeds.
    """

    name: str
    path: str
    variable: Any
    is_shared: bool


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
        name = f"{WEIGHTS}/{i}/{_bare(variable.name)}"
        found.append(Named(name, variable.path, variable, id(variable) in trained))
    for number, optimizer in enumerate(optimizers_of(model)):
        kind = type(optimizer).__name__
        reported = {id(v) for v in _reported(optimizer)}
        for i, variable in enumerate(optimizer.variables):
            what = RECORD if id(variable) in reported else OPTIMIZER
            name = f"{what}/{number}/{kind}/{i}"
            found.append(Named(name, variable.path, variable, True))
    for i, variable in enumerate(model.metrics_variables):
        name = f"{METRICS}/{i}/{_bare(variable.name)}"
        found.append(Named(name, variable.path, variable, False))
    seen: dict[int, Named] = {}
    for each in found:
        seen.setdefault(id(each.variable), each)
    return list(seen.values())


def tally_of(optimizer: Any) -> ScaleVariables | None:
    """Returns the counters of a `tfamp.LossScaleOptimizer`, None of another one."""
    stored = getattr(optimizer, "scale_variables", None)
    return stored if isinstance(stored, ScaleVariables) else None


def _reported(optimizer: Any) -> list[Any]:
    stored = tally_of(optimizer)
    return [] if stored is None else [stored.levels, stored.recent]


def _bare(name: str) -> str:
    """Returns a name without the number that Keras counts on with.

    Example:
        >>> _bare("seed_generator_state"), _bare("variable_12")
        ('seed_generator_state', 'variable')
    """
    return _NUMBERED.sub("", name)
