"""`tfamp.find_batch_size`: the batch that trains fastest in the memory there is."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import MemoryLimit
from tfamp.machine.nvml import Nvml
from tfamp.memory.batch_search import processes
from tfamp.memory.batch_search.processes import Settings
from tfamp.memory.batch_search.records import (
    BatchSearch,
    StoppedBy,
    Trial,
    allowed_bytes,
)
from tfamp.memory.batch_search.search import (
    MAX_BATCH_SIZE,
    Found,
    Split,
    search,
    splits,
)
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.units import format_bytes
from tfamp.trials import parcel
from tfamp.trials.batches import batch_of
from tfamp.trials.tasks import Facts, Task

_PURPOSE = "`tfamp.find_batch_size`"


def find_batch_size(
    build_model: Callable[..., Any] | str,
    data: Any = None,
    *,
    policy: str | None = None,
    max_memory_bytes: int | None = None,
    start: int = 8,
    max_batch_size: int | None = None,
    margin: float = 0.1,
    min_gain: float | None = 0.05,
    target_batch_size: int | None = None,
    steps: int = 3,
    timeout_seconds: float = 600.0,
    verbose: bool = True,
    on_trial: Callable[[Trial], None] | None = None,
) -> BatchSearch:
    """Searches for the smallest batch that trains about as fast as any that fits.

    Each size is trained a few steps by `fit` in a fresh process, which takes about ten
    seconds. So a trial that runs out of memory ends nothing but itself, and nothing is
    left behind. The size doubles until it does not fit, or until that gains too little
    speed twice in a row: from there on a larger batch costs memory and accuracy for
    nothing. It never takes more than half of the data. Where
    memory ends it, multiples of 8 between are tried too. What is returned has been
    tried and fits.

    On a GPU use it from a process that has not used the GPU yet, with a function as
    `data`: TensorFlow takes all of its memory and would leave none to the trials.

    Policy, plan and rules of `tfamp.enable`, threads, logical CPU devices, and an open
    scope of a MirroredStrategy hold in the trials too; whatever else was set belongs
    into `build_model`. Sizes count the examples of all replicas.

    Args:
        build_model: Returns a compiled model, or (model, train) or (model, train,
            validation) where no data is passed; called in each trial. Or the name of
            such a function, as "module:function".
        data: What `fit` takes (a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, arrays (x, y)), or a function that
            returns one of them. The rows of its first batch are
            repeated to the size that is tried.
        policy: What to build under, as in `tfamp.compare`: "mixed_bfloat16",
            "float32+xla" and so on. None takes what is in force now.
        max_memory_bytes: The most that a process may hold, on a GPU the most that
            TensorFlow may take there. None takes what the machine has
            (`tfamp doctor` shows it), which also holds where it is less.
        start: The first size; halved where it does not fit.
        max_batch_size: The largest size to try; None for 2**20.
        margin: Part of the limit that has to stay free: validation, callbacks and the
            fragmentation of long runs take memory that few steps do not show.
        min_gain: Part by which a doubled batch has to be faster; below lies noise. None
            takes the largest batch that fits, however fast.
        target_batch_size: Examples of one update to keep to, in so many steps as it
            takes. The memory for adding up gradients is then held in the trials.
        steps: Steps to time after the first, at least; short ones are repeated for
            half a second.
        timeout_seconds: The most that a trial may take.
        verbose: Whether to show progress, on a terminal only.
        on_trial: Gets each trial as it ends.

    Returns:
        The `BatchSearch`: `.batch_size`, `.accumulation_steps`, `.trials`, `.advice`;
        `print` it for all of it.

    Raises:
        ImportError: A package of `tfamp[report]` is not installed.
        MemoryError: Not even one example for each replica fits.
        RuntimeError: A trial failed, and not for want of memory; the end of its log
            is in the message.
        TimeoutError: Not even one example for each replica is trained in time.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is out of range, or the data is empty.

    Example:
        >>> found = find_batch_size(build_model, data)  # doctest: +SKIP
        >>> found.batch_size, found.stopped_by  # doctest: +SKIP
        (256, 'knee')
        >>> found.effective_batch_size, found.accumulation_steps  # doctest: +SKIP
        (256, 1)
    """
    title = parcel.name_of(build_model)
    start, caps = _checked_caps(start, max_batch_size, target_batch_size)
    margin = _part("margin", margin)
    min_gain = None if min_gain is None else _part("min_gain", min_gain)
    checks.positive_int("steps", steps)
    timeout_seconds = checks.positive("timeout_seconds", timeout_seconds)
    for module in ("cloudpickle", "psutil"):
        checks.require(module, extra="report", purpose=_PURPOSE)
    settings = Settings.present(policy)
    limit = memory_limit(max_memory_bytes)
    batch = None if data is None or callable(data) else batch_of(data)
    task = Task(
        settings.policy,
        steps=steps,
        allowed_bytes=allowed_bytes(limit, margin),
        target_batch_size=target_batch_size,
        data_batch_size=None if batch is None else batch.size,
        num_examples=None if batch is None else batch.num_examples,
    )
    shown = progress("Trying batch sizes", unit="trials")
    silent = contextlib.nullcontext(lambda done: None)
    with (
        tempfile.TemporaryDirectory(prefix="tfamp-batch-size-") as name,
        shown if verbose else silent as show,
    ):
        folder = Path(name)
        settings.write(folder)
        if batch is not None:  # all that the trials get of the data
            data = tf.data.Dataset.from_tensors(batch.parts)
        parcel.pack(folder, build_model, data, None)
        trials = _Trials(folder, task, timeout_seconds, show, on_trial)
        found = search(
            trials,
            start=start,
            caps=caps,
            min_gain=min_gain,
            facts=lambda: trials.facts,
        )
        if found.chosen is None:
            _raise_none_fits(found, limit, task, title)
        split = _split(trials, found.chosen.batch_size, target_batch_size)
    tried = {trial.batch_size: trial for trial in trials.made}
    tried |= {trial.batch_size: trial for trial in found.trials}
    return BatchSearch(
        model=trials.facts.model,
        policy=settings.policy,
        batch_size=split.batch_size,
        accumulation_steps=split.steps,
        trials=tuple(tried.values()),
        stopped_by=found.stopped_by,
        largest_that_fits=found.largest_that_fits,
        limit=limit,
        margin=margin,
        min_gain=min_gain,
        replicas=trials.facts.replicas,
        data_batch_size=trials.facts.data_batch_size,
        target_batch_size=target_batch_size,
    )


class _Trials:
    """Makes the trials of a search and shows them.

    `made` has all in order, `facts` what the last one that got so far told of model
    and data.
    """

    def __init__(
        self,
        folder: Path,
        task: Task,
        timeout_seconds: float,
        show: Callable[[int], None],
        on_trial: Callable[[Trial], None] | None,
    ) -> None:
        self.made: list[Trial] = []
        self.facts = Facts()
        self._folder, self._task, self._timeout = folder, task, timeout_seconds
        self._show, self._on_trial = show, on_trial

    def __call__(self, size: int) -> Trial:
        task = dataclasses.replace(self._task, batch_size=size)
        trial = processes.try_size(self._folder, task, timeout_seconds=self._timeout)
        self.facts = processes.facts_of(self._folder, task) or self.facts
        self.made.append(trial)
        self._show(len(self.made))
        if self._on_trial is not None:
            self._on_trial(trial)
        return trial


def _split(trials: _Trials, size: int, target: int | None) -> Split:
    """Returns the steps of an update, of a size that was tried and fits."""
    if target is None:
        return Split(size, 1)
    fitting = {trial.batch_size for trial in trials.made if trial.fits}
    for split in splits(size, target, replicas=trials.facts.replicas):
        if split.batch_size in fitting or trials(split.batch_size).fits:
            return split
    return Split(size, math.ceil(target / size))


def _raise_none_fits(
    found: Found, limit: MemoryLimit | None, plan: Task, title: str
) -> NoReturn:
    trial = min(found.trials, key=lambda trial: trial.batch_size)
    least = f"Not even batch size {trial.batch_size} of {title!r}"
    model = f"The model of {title!r}"
    if trial.outcome == "too slow":
        what = (
            f"{least} was trained"
            if trial.began_training
            else f"{model} was not even built"
        )
        raise TimeoutError(
            f"{what} in time: {trial.detail} Expected a few steps to end by then. Pass "
            "a larger `timeout_seconds`, or fewer `steps`."
        )
    what = f"{model} does not fit, even before its first batch"
    if trial.began_training:
        what = f"{least} fits"
    held = "" if trial.peak_bytes is None else f" at {format_bytes(trial.peak_bytes)}"
    why = f" ({trial.detail})" if trial.detail else ""
    most = "this machine's memory"
    if limit is not None and plan.allowed_bytes is not None:
        allowed = format_bytes(plan.allowed_bytes)
        most = f"{allowed} ({limit.source}, less the margin)"
    raise MemoryError(
        f"{what}: the trial ended by {trial.outcome!r}{held}{why}; expected it to stay "
        f"within {most}. Compute activations again by `tfamp.remat(model)`, pass a "
        "`policy` of half precision such as 'mixed_bfloat16', shorten or shrink the "
        "inputs, or allow more memory."
    )


def _checked_caps(
    start: int, max_batch_size: int | None, target_batch_size: int | None
) -> tuple[int, dict[StoppedBy, int]]:
    """Returns the first size and the most that a batch may be, by what says so."""
    checks.positive_int("start", start)
    caps: dict[StoppedBy, int] = {"max_batch_size": MAX_BATCH_SIZE}
    if max_batch_size is not None:
        caps["max_batch_size"] = checks.positive_int("max_batch_size", max_batch_size)
    if start > caps["max_batch_size"]:
        raise ValueError(
            f"`start` is {start}, but `max_batch_size` is {caps['max_batch_size']}; "
            "expected at most that. Pass a smaller `start`."
        )
    if target_batch_size is not None:
        caps["target_batch_size"] = checks.positive_int(
            "target_batch_size", target_batch_size
        )
    return min(start, *caps.values()), caps


def _part(argument: str, value: object) -> float:
    """Returns a part that may be 0 and may not be 1."""
    part = checks.fraction(argument, value)
    return part if part == 0 else checks.fraction(argument, part, closed=False)


def memory_limit(max_memory_bytes: int | None = None) -> MemoryLimit | None:
    """Returns the memory that a fresh training process may take, and what decides it.

    The one with the least room decides, since a process that passes any of them fails:
    on a GPU the caller's and what is free there; on a CPU the caller's, the machine's
    memory and the cgroups of this process (containers, batch systems), both less what
    is in use, and `ulimit -v`. None where nothing is known, as on a GPU without NVML.
    """
    found = []
    if max_memory_bytes is not None:
        most = checks.positive_int("max_memory_bytes", max_memory_bytes)
        found.append(MemoryLimit(most, "max_memory_bytes"))
    if tf.config.get_visible_devices("GPU"):
        nvml = Nvml.open()
        with nvml or contextlib.nullcontext():
            readings = [] if nvml is None else nvml.read()
        found += [
            MemoryLimit(each.memory_total_bytes, "GPU memory", each.memory_used_bytes)
            for each in readings
            if each.memory_total_bytes is not None
        ]
    else:
        found += [
            # Addresses are each process's own; what this one uses is no loss.
            dataclasses.replace(limit, used_bytes=None)
            if limit.source == limits.ADDRESS_SPACE
            else limit
            for limit in limits.memory_limits()
        ]
    return min(found, key=lambda limit: limit.free_bytes, default=None)
