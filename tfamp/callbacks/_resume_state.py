"""What `Resume` keeps beside the variables of a model, and whether it fits a `fit`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.data.stages.augment import EpochCounter
from tfamp.dtypes import resolution
from tfamp.keras_hooks import around_training, structure, trainer
from tfamp.keras_hooks.epochs import Feed
from tfamp.records import checks
from tfamp.stepping import snapshots
from tfamp.stepping.snapshots import State, optimizers_of
from tfamp.stepping.unchanged import take_random

# The name of this record among the counters of a state.
KEY = "resume"
# What TensorFlow gives where no global seed is set.
_NO_SEED = 87654321


def take(model: keras.Model, feed: Feed, position: dict[str, Any]) -> State:
    """Returns the state of a training, which stands at `position`."""
    history = getattr(model, "history", None)
    logs = {}
    for name, values in history.history.items() if history is not None else ():
        with contextlib.suppress(TypeError, ValueError):
            logs[name] = [float(value) for value in values]
    counters = {
        **position,
        "data": data_of(model, feed),
        "dtypes": dtypes_of(model),
        "platform": platform(),
        "random": take_random(),
        "history": {"epoch": list(history.epoch) if history else [], "logs": logs},
    }
    return snapshots.take(model).with_counters(**{KEY: counters})


def put(model: keras.Model, state: State, batch: Any, directory: str) -> None:
    """Gives a model, built from `batch` if need be, what a state holds, or raises."""
    held = state.counters[KEY]
    with model.distribute_strategy.scope():
        trainer.build_from(model, batch)
    for _, part, _ in structure.walk(model):
        # Networks that a train step of the user's calls, as its first step would.
        if isinstance(part, keras.Model) and part.built:
            resolution.resolve(part)
    if not all(optimizer.built for optimizer in optimizers_of(model)):
        # Only the train step knows their variables; what it does is undone below.
        around_training.on_batch(model)(batch)
    try:
        snapshots.put(model, state)
    except ValueError as error:
        why = f"is of another model than {model.name!r}: {checks.first_line(error)}"
        raise refusal(directory, why) from error
    for before, now in zip(held["dtypes"], dtypes_of(model), strict=False):
        if before != now:
            what = f"a layer computed as {' '.join(before)}, and now as {' '.join(now)}"
            raise refusal(directory, f"was under another policy: {what}")
    if (history := getattr(model, "history", None)) is not None:
        history.epoch[:] = held["history"]["epoch"]
        history.history.clear()
        history.history.update(held["history"]["logs"])


def refusal(directory: str, why: str) -> ValueError:
    """Returns the error for a training in a folder that is none of this program's."""
    return ValueError(
        f"The training in {directory!r} {why}; expected the same program as before. "
        "Run that one, or pass another `directory`."
    )


def dtypes_of(model: keras.Model) -> list[list[str]]:
    """Returns class, compute and variable dtype of a model's layers, in order."""
    return [
        [type(x).__name__, str(x.compute_dtype), str(x.variable_dtype)]
        for _, x, _ in structure.walk(model)
    ]


def data_of(model: keras.Model, feed: Feed) -> dict[str, Any]:
    """Returns what has to be the same of the data where a training goes on."""
    names = ("num_batches", "batch_size", "steps_per_execution")
    return {
        **{name: getattr(feed, name) for name in names},
        "replicas": snapshots.num_local_replicas(model),
    }


def platform() -> list[Any]:
    """Returns the global seed, and what computes: it may round otherwise elsewhere."""
    # With a seed for the operation, so that no random number is drawn for it.
    seed, _ = tf.compat.v1.get_seed(1)
    versions = f"TensorFlow {tf.__version__} and Keras {keras.__version__}"
    return [None if seed == _NO_SEED else int(seed), versions]


def unrepeatable(feed: Feed) -> str | None:
    """Returns why another process cannot bring the data in the same order, if so."""
    is_seeded, stages = platform()[0] is not None, list(_stages(feed.dataset))
    if feed.kind == "other":
        return "the order of a generator or PyDataset is its own"
    if feed.kind == "arrays" and feed.shuffles and not is_seeded:
        return "`fit` shuffles arrays without a seed"
    if not is_seeded and any(not each.is_seeded for each in _counters(feed)):
        return "the dataset has an `augment` without a seed"
    for each in stages:
        seeds: list[Any] = [getattr(each, name, None) for name in ("_seed", "_seed2")]
        if all(map(tf.is_tensor, seeds)) and not any(int(seed) for seed in seeds):
            return "the dataset has a `shuffle` without a seed"
    return None


def take_passes(feed: Feed) -> list[int]:
    """Returns how many whole passes pipelines have counted, by which they augment."""
    return [int(each.read()) for each in _counters(feed)]


def put_passes(feed: Feed, held: Sequence[int]) -> None:
    """Has pipelines count on from what `take_passes` gave."""
    for counter, passes in zip(_counters(feed), held, strict=False):
        counter.go_to(passes)


def _counters(feed: Feed) -> list[EpochCounter]:
    stages = _stages(feed.dataset)
    found = (getattr(each, EpochCounter.ATTRIBUTE, None) for each in stages)
    return [each for each in found if isinstance(each, EpochCounter)]


def _stages(dataset: Any) -> Iterator[Any]:
    """Yields a dataset, and those that it is made of; nothing for None."""
    if dataset is not None:
        yield dataset
        for each in getattr(dataset, "_inputs", list)():
            yield from _stages(each)


# What workers get whose reductions TensorFlow aborts, as another one does not answer.
_ABORTS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)


def place_of(strategy: Any) -> tuple[int, int]:
    """Returns the number of this worker, and of all; (0, 1) where one trains alone."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 0, 1
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict()
    first = len(jobs.get("chief", [])) if resolver.task_type == "worker" else 0
    number = sum(len(jobs.get(job, [])) for job in ("chief", "worker"))
    return first + int(resolver.task_id), max(1, number)


def has_lost_another(error: BaseException | None) -> bool:
    """Returns whether training ended as another worker does not answer any more."""
    return isinstance(error, _ABORTS) and "ollective" in str(error)


def check_same(strategy: Any, step: int, directory: str) -> None:
    """Raises unless all workers resume from the same step, -1 for the beginning."""

    def added_up() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.constant(step, tf.float64))

    total = strategy.experimental_local_results(strategy.run(added_up))[0]
    if float(total) / strategy.num_replicas_in_sync != step:
        found = "no file of all" if step < 0 else f"step {step}"
        raise ValueError(
            f"`directory` is {directory!r}, in which this worker found {found}, and "
            "another one something else; expected a folder that all workers see. Pass "
            "one on a shared disk, or delete the files of the newest step."
        )
