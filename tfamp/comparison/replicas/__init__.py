"""`scaling`: what more replicas bring, and where their time goes."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.comparison.replicas.judgement import Kind
from tfamp.comparison.replicas.measurement import Measurement, check_batch, num_gpus
from tfamp.comparison.replicas.processes import ReplicaJob
from tfamp.comparison.replicas.result import Scaling
from tfamp.memory.batch_search import find_batch_size
from tfamp.memory.batch_search.processes import Settings, batch_of
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.trials import parcel

_PURPOSE = "`tfamp.scaling`"


def scaling(
    build: Callable[..., Any] | str,
    data: Any = None,
    replicas: Sequence[int] = (1, 2),
    *,
    workers: bool = False,
    policy: str | None = None,
    batch_size: int | None = None,
    max_memory_bytes: int | None = None,
    seconds: float = 20.0,
    timeout_seconds: float = 600.0,
    verbose: bool = True,
) -> Scaling:
    """Measures what more replicas bring, and says what holds them up.

    In stages, each a gate for the next. One device: is half precision really used
    (`tfamp.prove`), does the input keep up (`tfamp.data.bottleneck`). The batch:
    `tfamp.find_batch_size`, where a memory limit is given. Then each number of
    replicas: are their first steps those of one device to rounding; only then speed.
    Each runs in fresh processes, whose steps are timed in turns.

    Replicas are the GPUs of one process, or logical CPUs where there is no GPU: those
    share cores, so that equality holds and speed says nothing of GPUs. With `workers`
    each is a process on this host, as machines are; so it sees what their network
    costs, as on a throttled interface. Policy and rules of `tfamp.enable` hold in all
    of them.

    The share of communication is what goes when the same step is traced with the
    reduction left out: what computing hides is not in it.

    Args:
        build: Returns a compiled model, or (model, train) or (model, train,
            validation) where no data is passed; called in each process, in the scope of
            its strategy. Or the name of such a function, as "module:function".
        data: What `fit` takes, or a function that returns it.
        replicas: Numbers of replicas; 1 is always measured.
        workers: Whether each replica is a process of its own
            (`MultiWorkerMirroredStrategy`), not a device of one (`MirroredStrategy`).
        policy: What to build under, as in `tfamp.compare`. None takes what is in force.
        batch_size: Examples of a step on one device; None takes that of the data.
        max_memory_bytes: The most that a process may hold: the batch size is then what
            `tfamp.find_batch_size` finds. None leaves that search out.
        seconds: About how long to time replicas, and half of that the input. At least
            six rounds are made, so slow steps take longer.
        timeout_seconds: The most that a process may take for one answer.
        verbose: Whether to show progress, on a terminal only.

    Returns:
        The `Scaling`: `.verdict`, `.advice`, `.efficiency`, `.communication_share`,
        `.input_share`, `.points`; `print` it, or write it by `.to_json(path)` and
        `.to_html(path)`.

    Raises:
        ImportError: A package of `tfamp[report]` is not installed.
        RuntimeError: A process failed, or this is called in the scope of a strategy.
        TimeoutError: A process took too long.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is out of range, or the data is empty.

    Example:
        >>> found = scaling(build, data, replicas=(1, 2, 4))  # doctest: +SKIP
        >>> found.verdict, round(found.communication_share, 2)  # doctest: +SKIP
        ('communication', 0.41)
    """
    title = parcel.name_of(build)
    if isinstance(build, str):
        parcel.load(build)  # now, not in each process
    kind = kind_of(workers)
    numbers = checked_replicas(replicas, kind)
    seconds = checks.positive("seconds", seconds)
    timeout_seconds = checks.positive("timeout_seconds", timeout_seconds)
    if batch_size is not None:
        checks.positive_int("batch_size", batch_size)
        if max_memory_bytes is not None:
            raise ValueError(
                f"`batch_size` is {batch_size} and `max_memory_bytes` is "
                f"{max_memory_bytes!r}; expected one of them, as a limit has the batch "
                "size searched for. Leave one out."
            )
    for module in ("cloudpickle", "psutil", "scipy"):
        checks.require(module, extra="report", purpose=_PURPOSE)
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise RuntimeError(
            f"Called inside the scope of a {name}; expected none, since each number of "
            "replicas has a strategy of its own. Call it outside."
        )
    settings = Settings.present(policy)
    if data is not None and not callable(data) and not hasattr(data, "__next__"):
        batch_size = batch_size or (
            None if max_memory_bytes is not None else batch_of(data).size
        )
    if batch_size is not None:
        check_batch(batch_size, numbers)
    notes: list[str] = []
    if max_memory_bytes is not None:
        found = find_batch_size(
            *(build, data),
            policy=policy,
            max_memory_bytes=max_memory_bytes,
            verbose=verbose,
        )
        batch_size = found.batch_size
        notes.append(
            f"`tfamp.find_batch_size` chose batches of {batch_size} "
            f"({found.stopped_by})."
        )
        check_batch(batch_size, numbers)
    job = ReplicaJob(title, kind, batch_size, seconds / 2)
    with tempfile.TemporaryDirectory(prefix="tfamp-scaling-") as name:
        folder = Path(name)
        job.to_json(folder / ReplicaJob.FILE)
        settings.write(folder)
        notes += parcel.pack(folder, build, data, None, called="data")
        shown = progress("Starting one device", unit="stages")
        silent = contextlib.nullcontext(lambda done, description=None: None)
        with shown if verbose else silent as show:
            work = Measurement(
                folder, kind, numbers, timeout_seconds=timeout_seconds, show=show
            )
            try:
                return work.measure(seconds, notes)
            finally:
                work.end()


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
