"""What a file says of a training beside its variables, and whether it fits another."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.epochs import Feed

# The name of this record among the counters of a state.
KEY = "resume"
# What TensorFlow gives where no global seed is set.
_NO_SEED = 87654321


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


def check_data(
    held: dict[str, Any], feed: Feed, directory: str, *, others: bool
) -> None:
    """Raises where the data of `fit` are none of those of the training before.

    Args:
        held: What `facts_of` gave then.
        feed: The data now.
        directory: Named in the error.
        others: Whether the number of workers is another, so that batches may be too.
    """
    now = facts_of(feed)
    names = ["steps_per_execution"] if others else list(now)
    changed = [
        name
        for name in names
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
    layers = _layers(model)
    now = dtypes_of(model)
    if [each[0] for each in held] != [each[0] for each in now]:
        return  # another model, which its variables tell better
    for (path, _), before, after in zip(layers, held, now, strict=True):
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
    if any(map(_is_unseeded_shuffle, stages)):
        return "the dataset has a `shuffle` without a seed"
    if any("DataService" in type(each).__name__ for each in stages):
        return "a data service brings elements in the order in which they are ready"
    return None


def _stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset, and those that it is made of."""
    yield dataset
    for each in getattr(dataset, "_inputs", list)():
        yield from _stages(each)


def _is_unseeded_shuffle(dataset: Any) -> bool:
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(map(tf.is_tensor, seeds)) and not any(int(seed) for seed in seeds)
