"""Whether the first steps of several replicas are those of one device.

All begin with the same bits and see the same batch. What is compared is how far
weights and slots came: a slot is linear in the gradient, or in its square, so it shows
a wrong factor that the update of an adaptive optimizer hides.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfamp.comparison.replicas.processes import state_file
from tfamp.comparison.replicas.steps import Step
from tfamp.keras_hooks import structure
from tfamp.stepping.snapshots import names, state

_APPLIED, _MAX_STEPS = 2, 20
# Of layers that draw, by the attributes that say how much.
_DRAWING = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout")
# How far sums of a batch in another order may be apart, as a part of the way that they
# went. Gradients of a layer are rounded once to its compute dtype, and parts of a batch
# may cancel, so that of a rounding's eps (2**-24, 2**-11, 2**-8) tens are left.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


def make(
    model: keras.Model,
    parts: Any,
    size: int,
    *,
    folder: Path,
    replicas: int,
    steps: int | None,
) -> tuple[int, list[str], list[str]]:
    """Makes steps from the weights of one device, and keeps the state after them.

    Layers that draw draw nothing, and statistics of a batch are those of the whole
    batch, as neither is meant to be equal. None for `steps` ends after two that were
    applied. Afterwards the model is where it began. Returns how many steps there were,
    what a reader should know, and the layers that go on drawing.
    """
    start = state_file(folder, 0)
    if replicas == 1:
        _keep(start, model)
    else:
        _put_weights(model, _kept(start))
    before = state.take(model)
    with _made_equal(model) as (notes, random):
        step = Step(model, parts, size)
        # The first call made one.
        state.put(model, before)
        made = 0
        while made < (_MAX_STEPS if steps is None else steps):
            step.run(1)
            made += 1
            if steps is None and _applied(model, made) >= _APPLIED:
                break
    _keep(state_file(folder, replicas), model)
    state.put(model, before)
    return made, notes, random


def distances(folder: Path, replicas: int) -> dict[str, float]:
    """Returns how far the ends of one device and of some replicas are apart.

    That is, of "weights" and of "slots" where there are any, the distance as a part of
    the way that one device went; infinite where only one of them moved.
    """
    states = [_kept(state_file(folder, number)) for number in (0, 1, replicas)]
    one = states[1]
    groups: dict[str, list[str]] = {"weights": [], "slots": []}
    shapes = {each.shape for name, each in one.items() if name.startswith("weights/")}
    for name, array in one.items():
        is_slot = name.startswith(f"{names.OPTIMIZER}/")
        if array.dtype.kind != "f" or (is_slot and array.shape not in shapes):
            continue  # counters, seeds
        if is_slot and not array.shape:
            continue  # a rate, which has the shape of a weight that is a scalar
        groups["slots" if is_slot else "weights"].append(name)
    return {
        group: apart(*({name: state[name] for name in members} for state in states))
        for group, members in groups.items()
        if members
    }


def apart(
    start: Mapping[str, np.ndarray],
    one: Mapping[str, np.ndarray],
    other: Mapping[str, np.ndarray],
) -> float:
    """Returns the distance of two ends as a part of the way that the first one went.

    Example:
        >>> start, one = {"w": np.zeros(2)}, {"w": np.array([3.0, 4.0])}
        >>> apart(start, one, {"w": np.array([3.0, 3.0])})
        0.2
        >>> apart(start, start, one)
        inf
    """
    gap = way = 0.0
    for name, begin in start.items():
        end = np.asarray(one[name], np.float64)
        gap += float(np.sum((np.asarray(other[name], np.float64) - end) ** 2))
        way += float(np.sum((end - np.asarray(begin, np.float64)) ** 2))
    if not way:
        return math.inf if gap else 0.0
    return math.sqrt(gap / way)


def tolerances(dtypes: list[str], *, tf32: bool, has_slots: bool) -> dict[str, float]:
    """Returns how far weights and slots may be apart where a model computes in these.

    An adaptive optimizer goes by the sign of a gradient, so where a part of p of the
    gradients may be rounded to either side of 0 the weights are 2 * sqrt(p) apart.

    Example:
        >>> tolerances(["float32"], tf32=False, has_slots=False)
        {'slots': 0.001, 'weights': 0.001}
    """
    # TF32 has the fraction of float16.
    least = TOLERANCES["float16" if tf32 else "float32"]
    slots = max([least, *(TOLERANCES.get(name, least) for name in dtypes)])
    return {"slots": slots, "weights": 2 * math.sqrt(slots) if has_slots else slots}


@contextlib.contextmanager
def _made_equal(model: keras.Model) -> Iterator[tuple[list[str], list[str]]]:
    """Silences what differs between replicas by its nature.

    Yields what to know of it, and the layers that draw all the same.
    """
    before: list[tuple[Any, str, Any]] = []
    drawing: list[str] = []
    statistics: list[str] = []
    random: list[str] = []
    notes: list[str] = []
    for path, layer, _ in structure.walk(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            if not layer.synchronized:
                before.append((layer, "synchronized", False))
                layer.synchronized = True
                statistics.append(path)
            continue
        given = {n: getattr(layer, n) for n in _DRAWING if hasattr(layer, n)}
        rates = {n: x for n, x in given.items() if isinstance(x, float) and x}
        for name, rate in rates.items():
            before.append((layer, name, rate))
            setattr(layer, name, 0.0)
        if rates:
            drawing.append(path)
        elif not given and _draws(layer):
            random.append(path)
    if statistics:
        notes.append(
            f"BatchNormalization ({len(statistics)} layers) normalizes each replica's "
            "part of a batch by itself, which one device does not; first steps were "
            "compared with statistics of the whole batch. Pass `synchronized=True` to "
            "train so."
        )
    if drawing:
        notes.append(
            f"{len(drawing)} layers draw at random ({', '.join(drawing[:3])}), on each "
            "replica something else; first steps were compared with a rate of 0."
        )
    try:
        yield notes, random
    finally:
        for layer, name, value in before:
            setattr(layer, name, value)


def _draws(layer: Any) -> bool:
    generators = (
        getattr(layer, name, None) for name in ("seed_generator", "generator")
    )
    return any(isinstance(each, keras.random.SeedGenerator) for each in generators)


def _applied(model: keras.Model, made: int) -> int:
    """Returns the updates so far: steps, less those that were skipped."""
    tally = names.tally_of(model.optimizer)
    return made if tally is None else int(tally.numbers().counters.applied)


def _put_weights(model: keras.Model, kept: Mapping[str, np.ndarray]) -> None:
    strategy = model.distribute_strategy
    for named in names.named_variables(model):
        array = kept.get(named.name)
        if not named.name.startswith(f"{names.WEIGHTS}/") or array is None:
            continue
        if array.shape == tuple(named.variable.shape) and array.dtype.kind == "f":
            for part in strategy.experimental_local_results(named.variable.value):
                part.assign(array.astype(named.variable.dtype))


def _kept(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


def _keep(path: Path, model: keras.Model) -> None:
    """Writes weights and slots as NumPy does: bfloat16 as float32."""
    shown: dict[str, Any] = {
        name: array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        for name, array in state.take(model).arrays.items()
        if name.startswith((f"{names.WEIGHTS}/", f"{names.OPTIMIZER}/"))
    }
    np.savez(path, **shown)
