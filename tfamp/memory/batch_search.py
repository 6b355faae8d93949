"""`tfamp.find_batch_size`: the batch that trains fastest in the memory there is."""

import contextlib
import dataclasses
import math
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.dtypes.settings import IN_FORCE
from tfamp.machine import limits
from tfamp.machine.limits import MemoryLimit
from tfamp.machine.nvml import Nvml
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.memory.batch_records import BatchSearch, StoppedBy, Trial
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.units import format_bytes
from tfamp.trials import parcel, processes, runner, tasks
from tfamp.trials.batches import batch_of
from tfamp.trials.tasks import Facts, Task
from tfamp.trials.variant import Variant

_MAX_BATCH_SIZE = 2**20
# Steps that a trial times after the first, at least.
_STEPS = 3
# Part of the limit that stays free: validation, callbacks and the fragmentation of long
# runs take memory that few steps do not show.
_MARGIN = 0.1
# The answer lies within this part below the largest that fits.
_PRECISION = 1 / 8
# One slow process must not end the growth.
_MAX_FLAT = 2
# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"


def find_batch_size(
    build_model: Callable[..., Any] | str,
    data: Any = None,
    *,
    policy: str | None = None,
    max_memory_bytes: int | None = None,
    start: int = 8,
    max_batch_size: int | None = None,
    min_gain: float | None = 0.05,
    target_batch_size: int | None = None,
    timeout_seconds: float = 600.0,
) -> BatchSearch:
    """Searches for the smallest batch that trains about as fast as any that fits.

    Each size is trained a few steps by `fit` in a fresh process, which takes about ten
    seconds; one that runs out of memory ends nothing but itself. The size doubles until
    it does not fit, or until that gains too little speed twice in a row. It never takes
    more than half of the data. Where memory ends it, multiples of 8 between are tried
    too. What is returned has been tried and fits.

    On a GPU use it from a process that has not used the GPU yet, with a function as
    `data`: TensorFlow takes all of its memory and would leave none to the trials.

    Args:
        build_model: Returns a compiled model, or (model, train) where no data is
            passed, in each trial; a strategy belongs into it. Or "module:function".
        data: What `fit` takes, or a function that returns it. The rows of its first
            batch are repeated to the size that is tried.
        policy: What to build under, as in `tfamp.compare`; None takes that in force.
        max_memory_bytes: The most that a process may hold, on a GPU the most that
            TensorFlow may take there, of which a tenth stays free. None takes what the
            machine has (`tfamp doctor` shows it), which also holds where it is less.
        start: The first size, of all replicas; halved where it does not fit.
        max_batch_size: The largest size to try; None for 2**20.
        min_gain: Part by which a doubled batch has to be faster; None takes the largest
            batch that fits, however fast.
        target_batch_size: Examples of one update to keep to, in so many steps as it
            takes. The memory for adding up gradients is then held in the trials.
        timeout_seconds: The most that a trial may take.

    Returns:
        The `BatchSearch`: `.batch_size`, `.gradient_accumulation_steps`, `.trials`.

    Raises:
        ImportError: A package of `tfamp[report]` is not installed.
        MemoryError: Not even one example for each replica fits.
        RuntimeError: A trial failed, and not for want of memory; its log is told.
        TimeoutError: Not even one example for each replica is trained in time.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is out of range, or the data is empty.

    Example:
        >>> find_batch_size(build_model, data).batch_size  # doctest: +SKIP
        256
    """
    title = parcel.name_of(build_model)
    caps: dict[StoppedBy, int] = {
        "max_batch_size": checks.positive_int(
            "max_batch_size", max_batch_size or _MAX_BATCH_SIZE
        )
    }
    if target_batch_size is not None:
        target = checks.positive_int("target_batch_size", target_batch_size)
        caps["target_batch_size"] = target
    start = min(checks.positive_int("start", start), *caps.values())
    if min_gain is not None:
        checks.fraction("min_gain", min_gain)
    checks.positive("timeout_seconds", timeout_seconds)
    for module in ("cloudpickle", "psutil"):
        checks.require(module, extra="report", purpose="`tfamp.find_batch_size`")
    limit = memory_limit(max_memory_bytes)
    allowed = None if limit is None else int(limit.free_bytes * (1 - _MARGIN))
    batch = None if data is None or callable(data) else batch_of(data)
    with (
        tempfile.TemporaryDirectory(prefix="tfamp-batch-size-") as name,
        progress("Trying batch sizes", unit="trials") as show,
    ):
        folder = Path(name)
        task = Task(
            str(Variant.named(policy, "policy")) if policy else policy_in_force(folder),
            steps=_STEPS,
            allowed_bytes=allowed,
            target_batch_size=target_batch_size,
            data_batch_size=None if batch is None else batch.size,
            num_examples=None if batch is None else batch.num_examples,
        )
        if batch is not None:  # all that the trials get of the data
            data = tf.data.Dataset.from_tensors(batch.parts)
        parcel.pack(folder, build_model, data, None)
        search = _Search(folder, task, caps, min_gain, timeout_seconds, show)
        search.run(start)
        fitting = [trial for trial in search.trials.values() if trial.fits]
        if not fitting:
            smallest = min(search.trials.values(), key=lambda each: each.batch_size)
            raise _none_fits(smallest, limit, title)
        size, steps = search.split(_choice(fitting, min_gain).batch_size)
    return BatchSearch(
        model=search.facts.model,
        policy=task.policy,
        batch_size=size,
        gradient_accumulation_steps=steps,
        trials=tuple(search.trials.values()),
        stopped_by=search.stopped_by,
        limit=limit,
        allowed_bytes=allowed,
        replicas=search.facts.replicas,
        data_batch_size=search.facts.data_batch_size,
        target_batch_size=target_batch_size,
    )


class _Search:
    """Trials by size, which double, and are narrowed down where memory ends that."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        caps: dict[StoppedBy, int],
        min_gain: float | None,
        timeout_seconds: float,
        show: Callable[[int], None],
    ) -> None:
        self.trials: dict[int, Trial] = {}
        self.facts = Facts()
        self.stopped_by: StoppedBy = "max_batch_size"
        self._folder, self._task, self._caps = folder, task, caps
        self._min_gain, self._timeout, self._show = min_gain, timeout_seconds, show

    def run(self, start: int) -> None:
        """Tries sizes from the first on; it may be another, as the data allow it."""
        first = self._try(start)
        size, caps, number = first.batch_size, self._caps, self.facts.num_examples
        if number is not None:  # at least two batches make up the data
            caps = {**caps, "data": self.facts.possible(max(number // 2, 1))}
        self.stopped_by, cap = min(caps.items(), key=lambda item: item[1])
        good, bad = (self._grown(size, cap), 0) if first.fits else (0, size)
        bad = next((s for s, t in self.trials.items() if not t.fits), bad)
        if not first.fits:
            self.stopped_by = _ended_by(first)
            # Of a model that is not even built no other size is worth a trial.
            while not good and self.trials[bad].began_training:
                smaller = bad // 2 // self.facts.replicas * self.facts.replicas
                if smaller < 1:
                    break
                good, bad = (smaller, bad) if self._try(smaller).fits else (0, smaller)
        # Among small sizes every one counts.
        unit = self.facts.replicas if good < 8 else math.lcm(8, self.facts.replicas)
        while good and bad - good > max(unit, _PRECISION * good):
            middle = (good + bad) // 2 // unit * unit
            if middle <= good:
                break
            good, bad = (middle, bad) if self._try(middle).fits else (good, middle)

    def split(self, size: int) -> tuple[int, int]:
        """Returns a size that fits, and how many steps make up the target with it.

        First comes the largest batch that goes into the target without a rest; smaller
        than half of `size` it is too slow to be worth that.
        """
        target, replicas = self._task.target_batch_size, self.facts.replicas
        if target is None:
            return size, 1
        fewest = math.ceil(target / size)
        even = [
            n for n in range(fewest, 2 * fewest + 1) if target % (n * replicas) == 0
        ]
        nearest = max(1, round(target / fewest / replicas)) * replicas
        exact = [(target // n, n) for n in even[:1]]
        for each, steps in (*exact, (nearest, fewest)):
            if self._try(each).fits:
                return each, steps
        return size, fewest

    def _grown(self, good: int, cap: int) -> int:
        """Doubles a size until it does not fit or pay; returns the last that fits."""
        flat = 0
        while (larger := self._next(good, cap)) > good:
            trial = self._try(larger)
            if not trial.fits:
                self.stopped_by = _ended_by(trial)
                break
            speeds = [self.trials[s].examples_per_second or 0 for s in (good, larger)]
            is_last = larger < 2 * good  # what was left up to the cap
            is_flat = self._min_gain is not None and (
                speeds[1] < speeds[0] * (1 + self._min_gain)
            )
            flat = flat + 1 if is_flat and not is_last else 0
            good = larger
            if flat == _MAX_FLAT:
                self.stopped_by = "knee"
            if flat == _MAX_FLAT or is_last:
                break
        return good

    def _next(self, size: int, cap: int) -> int:
        """Returns twice the size, or what is left up to the cap."""
        if 2 * size <= cap:
            return 2 * size
        replicas = self.facts.replicas
        # An update of exactly the target is worth more than a multiple of 8.
        is_exact = self.stopped_by == "target_batch_size" or cap - size < 8
        return cap - cap % (replicas if is_exact else math.lcm(8, replicas))

    def _try(self, size: int) -> Trial:
        """Returns the trial of a size, or of what the data and replicas make of it."""
        if size in self.trials:
            return self.trials[size]
        task = dataclasses.replace(self._task, batch_size=size)
        trial, facts = try_size(self._folder, task, timeout_seconds=self._timeout)
        self.facts = facts or self.facts
        self.trials[trial.batch_size] = trial
        self._show(len(self.trials))
        return trial


def try_size(
    folder: Path, task: Task, *, timeout_seconds: float = 600.0
) -> tuple[Trial, Facts | None]:
    """Tries a batch size in a fresh process; the facts are None where it was not built.

    Raises:
        RuntimeError: The process failed, and not for want of memory.
    """
    run = runner.do(folder, task, timeout_seconds=timeout_seconds)
    told, log = folder / f"{task.name}.facts", folder / f"{task.name}.log"
    facts = Facts.from_json(told) if told.is_file() else None
    size = task.batch_size if facts is None else facts.batch_size
    outcome: Any = run.outcome
    if outcome.startswith("status "):
        outcome = _of_status(int(outcome.removeprefix("status ")), log)
    if not outcome:
        raise RuntimeError(
            f"The trial of batch size {size} failed, and not for want of memory: "
            f"{run.error}. Expected `build_model` and its data to train; mend what the "
            f"log ends with:\n{processes.tail(log)}"
        )
    memory = run.memory
    peak = None if memory is None else memory.device_bytes or memory.training_bytes
    trial = Trial(
        *(size or 1, outcome),
        examples_per_second=run.examples_per_second or None,
        step_seconds=run.step_seconds or None,
        peak_bytes=peak,
        began_training=facts is not None,
        detail=run.error,
    )
    return trial, facts


def policy_in_force(folder: Path) -> str:
    """Returns the policy in force as a variant's word; a plan becomes a file."""
    settings = IN_FORCE.settings
    if settings is None:
        return str(Variant(keras.config.dtype_policy().name, is_stock=True))
    if settings.plan is not None:
        return str(tasks.plan_file(folder, settings.plan))
    return str(settings.policy.name)


def _choice(fitting: list[Trial], min_gain: float | None) -> Trial:
    """Returns the least that is about as fast as the fastest; else the largest."""
    fitting = sorted(fitting, key=lambda trial: trial.batch_size)
    if min_gain is None:
        return fitting[-1]
    least = (1 - min_gain) * max(t.examples_per_second or 0.0 for t in fitting)
    return next(t for t in fitting if (t.examples_per_second or 0.0) >= least)


def _of_status(status: int, log: Path) -> str:
    """Returns how a process without an answer ended, "" if not for want of memory.

    The kernel kills by SIGKILL. C++ ends a process by SIGABRT or SIGSEGV for many
    reasons, so there the end of the log has to speak of memory.
    """
    if status == -signal.SIGKILL:
        return "killed"
    lines = processes.tail(log, 200).splitlines()
    own = [line for line in lines if _HARMLESS not in line]
    is_memory = any(is_out_of_memory(RuntimeError(line)) for line in own)
    return "out of memory" if is_memory else ""


def _ended_by(trial: Trial) -> StoppedBy:
    return "time" if trial.outcome == "too slow" else "memory"


def _none_fits(trial: Trial, limit: MemoryLimit | None, title: str) -> Exception:
    """Returns the error that says that not even the smallest size fits."""
    what = f"The model of {title!r} is not even built"
    if trial.began_training:
        what = f"Not even batch size {trial.batch_size} of {title!r} is trained"
    why = f" ({trial.detail})" if trial.detail else ""
    if trial.outcome == "too slow":
        return TimeoutError(
            f"{what} in time{why}; expected a few steps to end by then. Pass a larger "
            "`timeout_seconds`."
        )
    most = "this machine's memory"
    if limit is not None:
        most = f"{limit.source}: {format_bytes(limit.free_bytes)} less a tenth"
    return MemoryError(
        f"{what}: the trial ended by {trial.outcome!r}{why}; expected it to stay "
        f"within {most}. Compute activations again by `tfamp.remat(model)`, pass a "
        "`policy` of half precision such as 'mixed_bfloat16', shorten or shrink the "
        "inputs, or allow more memory."
    )


def memory_limit(max_memory_bytes: int | None = None) -> MemoryLimit | None:
    """Returns the memory that a fresh training process may take, and what decides it.

    The one with the least room decides: on a GPU the caller's and what is free there;
    on a CPU the caller's, the machine's and that of the cgroups of this process, less
    what is in use, and `ulimit -v`. None where nothing is known.
    """
    found = []
    if max_memory_bytes is not None:
        most = checks.positive_int("max_memory_bytes", max_memory_bytes)
        found.append(MemoryLimit(most, "max_memory_bytes"))
    if tf.config.get_visible_devices("GPU"):
        nvml = Nvml.open()
        with nvml or contextlib.nullcontext():
            readings = () if nvml is None else nvml.read()
        found += [
            MemoryLimit(each.memory_total_bytes, "GPU memory", each.memory_used_bytes)
            for each in readings
            if each.memory_total_bytes is not None
        ]
    else:
        found += limits.memory_limits()
    return min(found, key=lambda limit: limit.free_bytes, default=None)
