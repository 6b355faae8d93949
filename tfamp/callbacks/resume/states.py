"""The state of a whole training, and whether it fits another one.

Beside the variables of its model it holds where training stands, the history and random
numbers; what has to be the same is in its record.
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.stages.augment import EpochCounter
from tfamp.dtypes import resolution
from tfamp.keras_hooks import around_training, epochs, structure, trainer
from tfamp.keras_hooks.epochs import Feed
from tfamp.records import checks
from tfamp.stepping import snapshots
from tfamp.stepping.snapshots import State, optimizers_of

# The name of this record among the counters of a state.
KEY = "resume"
# What TensorFlow gives where no global seed is set.
_NO_SEED = 87654321
# Keras's callbacks that judge later epochs by earlier ones.
_JUDGES = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


def take(
    model: keras.Model,
    feed: Feed,
    position: dict[str, Any],
    *,
    into: State | None,
) -> tuple[State, State]:
    """Returns the state of a training, and the part whose memory may be used anew.

    `position` is where it stands, and `into` such a part that is not needed any more.
    """
    of_model = snapshots.take(model, into=into)
    counters = {
        **position,
        "facts": facts_of(feed),
        "dtypes": dtypes_of(model),
        "replicas": snapshots.num_local_replicas(model),
        "seed": global_seed(),
        "versions": versions(),
        "random": take_random(),
        "history": take_history(model),
    }
    state = dataclasses.replace(
        of_model,
        counters={**of_model.counters, KEY: counters},
    )
    return state, of_model


def put(
    model: keras.Model,
    state: State,
    batch: Any,
    directory: str,
) -> None:
    """Gives a model, its optimizer and its history what a state holds.

    The model is built from `batch`, what one replica gets, where it is not. A
    ValueError says that the state is of another model, or under another policy.
    """
    held = state.counters[KEY]
    with model.distribute_strategy.scope():
        trainer.build_from(model, batch)
    for _, part, _ in structure.walk(model):
        # Networks that a train step of the user's calls, as its first step would.
        if isinstance(part, keras.Model) and part.built:
            resolution.resolve(part)
    if not all(optimizer.built for optimizer in optimizers_of(model)):
        # Optimizers of the user's that only the train step knows the variables of.
        # What this step does to weights and seeds is undone by the state.
        around_training.on_batch(model)(batch)
    check_dtypes(held["dtypes"], model, directory)
    try:
        snapshots.put(model, state)
    except ValueError as error:
        raise ValueError(
            f"The training in {directory!r} is of another model than this "
            f"{model.name!r}: {checks.first_line(error)} Pass another `directory`, or "
            "delete the files in it."
        ) from error
    put_history(model, held["history"])


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, None where it was not called."""
    # With a seed for the operation, so that no random number is drawn for it.
    seed, _ = tf.compat.v1.get_seed(1)
    return None if seed == _NO_SEED else int(seed)


def versions() -> str:
    """Returns what computes, which may round otherwise in another version."""
    return f"TensorFlow {tf.__version__} and Keras {keras.__version__}"


def facts_of(feed: Feed) -> dict[str, Any]:
    """Returns what has to be the same where a training goes on."""
    return {
        "num_batches": feed.num_batches,
        "batch_size": feed.batch_size,
        "steps_per_execution": feed.steps_per_execution,
    }


def check_data(held: dict[str, Any], feed: Feed, directory: str) -> None:
    """Raises where the data of `fit` are none of those that `facts_of` gave before."""
    now = facts_of(feed)
    changed = [
        name
        for name in now
        if held[name] != now[name] and None not in (held[name], now[name])
    ]
    if changed:
        was = ", ".join(f"{name} {held[name]}" for name in changed)
        is_now = ", ".join(f"{name} {now[name]}" for name in changed)
        raise ValueError(
            f"The training in {directory!r} had {was}; this one has {is_now}. Expected "
            "the same data, in the same batches. Pass them, or another `directory`."
        )


def dtypes_of(model: keras.Model) -> list[list[str]]:
    """Returns class, compute dtype and variable dtype of a model's layers, in order."""
    return [
        [type(layer).__name__, str(layer.compute_dtype), str(layer.variable_dtype)]
        for _, layer in _layers(model)
    ]


def check_dtypes(held: list[list[str]], model: keras.Model, directory: str) -> None:
    """Raises where a layer computes in another dtype than in the training before."""
    now = dtypes_of(model)
    if [each[0] for each in held] != [each[0] for each in now]:
        return  # another model, which its variables tell better
    for (path, _), before, after in zip(_layers(model), held, now, strict=True):
        if before != after:
            raise ValueError(
                f"The training in {directory!r} was under another policy: layer "
                f"{path!r} computed in {before[1]} with variables in {before[2]}, and "
                f"computes in {after[1]} with {after[2]} now; expected the same. "
                "Enable the policy of that training, or pass another `directory`."
            )


def _layers(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    return [(p, each) for p, each, _ in structure.walk(model) if each is not model]


def unrepeatable(feed: Feed) -> str | None:
    """Returns why another process cannot bring the data in the same order, if so."""
    if feed.kind == "other":
        return "the order of a generator or PyDataset is its own"
    is_seeded = global_seed() is not None
    if feed.kind == "arrays" and feed.shuffles and not is_seeded:
        return "`fit` shuffles arrays without a seed"
    stages = [] if feed.dataset is None else list(_stages(feed.dataset))
    if not is_seeded and any(not each.is_seeded for each in _counters_in(stages)):
        return "the dataset has an `augment` without a seed"
    if any(map(_is_unseeded_shuffle, stages)):
        return "the dataset has a `shuffle` without a seed"
    if any("DataService" in type(each).__name__ for each in stages):
        return "a data service brings elements in the order in which they are ready"
    return None


def take_passes(feed: Feed) -> list[int]:
    """Returns how many whole passes pipelines have counted, by which they augment."""
    if feed.dataset is None:
        return []
    return [int(each.read()) for each in _counters_in(_stages(feed.dataset))]


def put_passes(feed: Feed, held: Sequence[int]) -> None:
    """Has pipelines count on from what `take_passes` gave."""
    if feed.dataset is None:
        return
    counters = _counters_in(_stages(feed.dataset))
    for counter, passes in zip(counters, held, strict=False):
        counter.go_to(passes)


def _counters_in(stages: Iterable[Any]) -> list[EpochCounter]:
    found = (getattr(each, EpochCounter.ATTRIBUTE, None) for each in stages)
    return [each for each in found if isinstance(each, EpochCounter)]


def _stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset, and those that it is made of."""
    yield dataset
    for each in getattr(dataset, "_inputs", list)():
        yield from _stages(each)


def _is_unseeded_shuffle(dataset: Any) -> bool:
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(map(tf.is_tensor, seeds)) and not any(int(seed) for seed in seeds)


def judges_in(callbacks: Sequence[Any]) -> list[str]:
    """Returns the classes of callbacks that judge epochs by what they remember."""
    found = {type(each).__name__ for each in callbacks if isinstance(each, _JUDGES)}
    return sorted(found)


def take_history(model: keras.Model) -> dict[str, Any]:
    """Returns the epochs and the logs of a model's `History` so far."""
    history = getattr(model, "history", None)
    if history is None:
        return {"epoch": [], "logs": {}}
    logs = {}
    for name, values in history.history.items():
        with contextlib.suppress(TypeError, ValueError):
            logs[name] = [float(value) for value in values]
    return {"epoch": [int(epoch) for epoch in history.epoch], "logs": logs}


def put_history(model: keras.Model, held: dict[str, Any]) -> None:
    """Puts the logs of earlier epochs in front of those to come."""
    history = getattr(model, "history", None)
    if history is not None:
        history.epoch[:] = held["epoch"]
        history.history.clear()
        history.history.update({k: list(v) for k, v in held["logs"].items()})


def take_random() -> dict[str, Any]:
    """Returns the states of Python's and NumPy's generators, and of Keras's own."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = epochs.global_seed_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "keras": None if state is None else np.asarray(state).tolist(),
    }


def put_random(held: dict[str, Any]) -> None:
    """Puts back what `take_random` gave, also where JSON has made lists of it."""
    version, keys, gauss = held["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = held["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    state = epochs.global_seed_state()
    if state is not None and held["keras"] is not None:
        state.assign(np.array(held["keras"], state.dtype))
