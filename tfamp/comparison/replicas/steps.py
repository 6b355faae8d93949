"""Steps of a model on replicas: timed, with and without what is added up, and compared.

What replicas send one another goes through `ReplicaContext.all_reduce` and `all_gather`
(gradients, weights of losses, statistics that are synchronized) and `Strategy.reduce`
(logs). All are public: while a step is traced they count what they are given, or give
it back.

All begin their first steps with the same bits and see the same batch. What is compared
is how far weights and slots came: a slot is linear in the gradient, or in its square,
so it shows a wrong factor that the update of an adaptive optimizer hides.

Relies on: them being looked up on `tf.distribute.ReplicaContext` and
`tf.distribute.Strategy` at each call.
"""

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import around_training, structure
from tfamp.keras_hooks.patches import Patch, PatchSet, replaced
from tfamp.stepping import snapshots
from tfamp.trials.training import rows

# The first steps allocate, and XLA compiles a second time for donated buffers.
_WARM_STEPS = 2
_APPLIED, _MAX_STEPS = 2, 20
# Of one device before its first step, and of so many replicas after theirs.
_START, _END = "state_0.npz", "state_{}.npz"
# Of layers that draw, by the attributes that say how much.
_DRAWING = ("rate", "stddev", "dropout", "recurrent_dropout", "_dropout")
# How far sums of a batch in another order may be apart, as a part of the way that they
# went. Gradients of a layer are rounded once to its compute dtype, and parts of a batch
# may cancel, so that of a rounding's eps (2**-24, 2**-11, 2**-8) tens are left.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


def counting(sizes: list[int | None]) -> contextlib.AbstractContextManager[None]:
    """Counts what is traced to be added up inside the block, and has it added up.

    That is the bytes of each tensor that the replicas of this process hand over, None
    where it has no shape: of gradients with gaps the rows differ.
    """

    def count(value: Any) -> None:
        for leaf in tf.nest.flatten(value):
            tensor = leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
            tensor = tf.convert_to_tensor(tensor)
            number = tensor.shape.num_elements()
            sizes.append(None if number is None else number * tensor.dtype.size)

    def all_reduce(original: Any) -> Any:
        @functools.wraps(original)
        def counted(
            self: Any, reduce_op: Any, value: Any, *args: Any, **how: Any
        ) -> Any:
            count(value)
            return original(self, reduce_op, value, *args, **how)

        return counted

    def all_gather(original: Any) -> Any:
        def counted(self: Any, value: Any, *args: Any, **how: Any) -> Any:
            count(value)
            return original(self, value, *args, **how)

        return counted

    return _patched(
        Patch(tf.distribute.ReplicaContext, "all_reduce", all_reduce),
        Patch(tf.distribute.ReplicaContext, "all_gather", all_gather),
    )


def alone() -> contextlib.AbstractContextManager[None]:
    """Has each replica keep what it would hand to the others, inside the block."""

    def all_reduce(self: Any, reduce_op: Any, value: Any, *_: Any, **how: Any) -> Any:
        # As the sum is: another tensor than what was given.
        return tf.nest.map_structure(_same, value)

    def all_gather(self: Any, value: Any, *_: Any, **how: Any) -> Any:
        return tf.nest.map_structure(_same, value)

    def reduce(self: Any, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        part = tf.convert_to_tensor(self.experimental_local_results(value)[0])
        return part if axis is None else tf.reduce_mean(part, axis)

    return _patched(
        Patch(tf.distribute.ReplicaContext, "all_reduce", lambda original: all_reduce),
        Patch(tf.distribute.ReplicaContext, "all_gather", lambda original: all_gather),
        Patch(tf.distribute.Strategy, "reduce", lambda original: reduce),
    )


@contextlib.contextmanager
def _patched(*patches: Patch) -> Iterator[None]:
    hooks = PatchSet(patches)
    hooks.install()
    try:
        yield
    finally:
        hooks.remove()


class Step:
    """One training step on a batch in memory, as `fit` takes it, ready to be timed.

    Rows of the batch are repeated to the `size` of all replicas together. Where it
    `reduces`, replicas add up what they have; else each goes on alone.
    """

    def __init__(
        self, model: keras.Model, parts: Any, size: int, *, reduces: bool = True
    ) -> None:
        self.sizes: list[int | None] = []
        self._batch = divided(model, parts, size)
        with replaced(model, steps_per_execution=1):
            self._call = around_training.on_batch(model)
        with counting(self.sizes) if reduces else alone():
            _wait(self._call(self._batch))

    def warm(self) -> float:
        """Runs it until it is warm; returns the seconds of the last step."""
        return [self.run(1) for _ in range(_WARM_STEPS)][-1]

    def run(self, num_steps: int) -> float:
        """Runs some steps, waits for the devices and returns their seconds."""
        began = time.perf_counter()
        for _ in range(num_steps):
            logs = self._call(self._batch)
        _wait(logs)
        return time.perf_counter() - began


def divided(model: keras.Model, parts: Any, size: int) -> Any:
    """Returns a batch of `size` examples as its replicas here get it in `fit`."""
    batch = tf.nest.map_structure(functools.partial(rows, size=size), parts)
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return batch
    options = tf.data.Options()
    # Each worker has the same batch in memory, and takes its part of it.
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    whole = tf.data.Dataset.from_tensor_slices(batch).batch(size).with_options(options)
    return next(iter(strategy.experimental_distribute_dataset(whole)))


def _wait(logs: Any) -> None:
    """Reads what a step gave, which waits for the device."""
    for leaf in tf.nest.flatten(logs)[:1]:
        np.asarray(leaf)


def _same(leaf: Any) -> Any:
    if isinstance(leaf, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.identity(leaf.values), tf.identity(leaf.indices), leaf.dense_shape
        )
    return tf.identity(leaf)


def make_steps(
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
    start = folder / _START
    if replicas == 1:
        _keep(start, model)
    else:
        _put_weights(model, _kept(start))
    before = snapshots.take(model)
    with _made_equal(model) as (notes, random):
        step = Step(model, parts, size)
        # The first call made one.
        snapshots.put(model, before)
        made = 0
        while made < (_MAX_STEPS if steps is None else steps):
            step.run(1)
            made += 1
            # Less those that were skipped.
            tally = snapshots.tally_of(model.optimizer)
            applied = made if tally is None else int(tally.numbers().applied)
            if steps is None and applied >= _APPLIED:
                break
    _keep(folder / _END.format(replicas), model)
    snapshots.put(model, before)
    return made, notes, random


def distances(folder: Path, replicas: int) -> dict[str, float]:
    """Returns how far the ends of one device and of some replicas are apart.

    That is, of "weights" and of "slots" where there are any, the distance as a part of
    the way that one device went; infinite where only one of them moved.
    """
    files = (_START, _END.format(1), _END.format(replicas))
    states = [_kept(folder / file) for file in files]
    one = states[1]
    groups: dict[str, list[str]] = {"weights": [], "slots": []}
    shapes = {each.shape for name, each in one.items() if name.startswith("weights/")}
    for name, array in one.items():
        is_slot = name.startswith(f"{snapshots.OPTIMIZER}/")
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
        elif not given and any(
            isinstance(getattr(layer, name, None), keras.random.SeedGenerator)
            for name in ("seed_generator", "generator")
        ):
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


def _put_weights(model: keras.Model, kept: Mapping[str, np.ndarray]) -> None:
    strategy = model.distribute_strategy
    for named in snapshots.named_variables(model):
        array = kept.get(named.name)
        if not named.name.startswith(f"{snapshots.WEIGHTS}/") or array is None:
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
        for name, array in snapshots.take(model).arrays.items()
        if name.startswith((f"{snapshots.WEIGHTS}/", f"{snapshots.OPTIMIZER}/"))
    }
    np.savez(path, **shown)
