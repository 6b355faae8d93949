"""What `scaling` can be asked for on this machine."""

import os
from collections.abc import Sequence

import tensorflow as tf

from tfamp.comparison.replicas.job import Kind
from tfamp.records import checks


def num_gpus() -> int:
    """Returns the GPUs of this machine that TensorFlow may use."""
    # The physical ones: to list the logical ones would start them.
    return len(tf.config.get_visible_devices("GPU"))


def kind_of(workers: object) -> Kind:
    """Returns what replicas are here, or raises unless `workers` is a boolean."""
    if not isinstance(workers, bool):
        raise TypeError(
            f"`workers` is {workers!r}, of type {type(workers).__name__}; expected "
            "True or False. Pass the numbers of workers as `replicas`."
        )
    if workers:
        return "workers"
    # One GPU makes no two replicas.
    return "GPUs" if num_gpus() > 1 else "logical CPUs"


def checked_replicas(replicas: object, kind: Kind) -> tuple[int, ...]:
    """Returns the numbers of replicas, 1 first."""
    given = list(replicas) if isinstance(replicas, (list, tuple, range)) else [replicas]
    numbers = [checks.positive_int("replicas", each) for each in given]
    if max(numbers, default=1) < 2:
        raise ValueError(
            f"`replicas` is {replicas!r}; expected at least one number above 1, to "
            "hold against one device. Pass for example (1, 2)."
        )
    limit = num_gpus() if kind != "logical CPUs" else 0
    if limit and max(numbers) > limit:
        raise ValueError(
            f"`replicas` holds {max(numbers)}, and this machine has {limit} GPUs; "
            f"expected at most {limit}. Pass for example {(1, limit)!r}."
        )
    cores = os.cpu_count() or 1
    if not limit and max(numbers) > _most_of(cores):
        raise ValueError(
            f"`replicas` holds {max(numbers)}, and this machine has {cores} cores; "
            f"expected at most {_most_of(cores)}. Measure on more devices."
        )
    return tuple(sorted({1, *numbers}))


def _most_of(cores: int) -> int:
    """Returns the most replicas on some cores, which are slow but right."""
    return max(4, 2 * cores)


def check_batch(batch_size: int, numbers: Sequence[int]) -> None:
    """Raises unless there is an example for each replica."""
    if batch_size < max(numbers):
        raise ValueError(
            f"A batch has {batch_size} examples, and `replicas` holds {max(numbers)}; "
            "expected an example for each replica. Pass a larger `batch_size`."
        )
