"""`tfamp.find_batch_size`: the batch that trains fastest in the memory there is."""

import dataclasses
import math
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from tfamp.dtypes.settings import IN_FORCE
from tfamp.machine.limits import MemoryLimit
from tfamp.machine.memory import machine_memory
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.records import checks, console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, format_rate, format_seconds
from tfamp.trials import parcel, runner
from tfamp.trials.run_records import Run, Task, possible_size
from tfamp.trials.variant import Variant, plan_file

_MAX_BATCH_SIZE = 2**20
# Steps that a trial times after the first, at least.
_STEPS = 3
_TIMEOUT_SECONDS = 600.0  # of a trial
# Part of the limit that stays free for what few steps do not show.
_MARGIN = 0.1
# The answer lies within this part below the largest that fits.
_PRECISION = 1 / 8
# One slow process must not end the growth.
_MAX_FLAT = 2
# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"
StoppedBy = Literal[
    "memory", "knee", "time", "max_batch_size", "target_batch_size", "data"
]
_WHY = {
    "memory": "a larger one does not fit",
    "knee": "doubling it twice gains too little",
    "time": "a larger one takes too long to try",
    "max_batch_size": "`max_batch_size` allows no more",
    "target_batch_size": "`target_batch_size` asks for no more",
    "data": "a larger one would be more than half of the data",
}


@dataclasses.dataclass(frozen=True)
class BatchSearch(TableRecord):
    """The batch size that trains fastest within the memory there is."""

    model: str
    policy: str
    batch_size: int  # examples of a step, on all replicas; it was tried and fits
    gradient_accumulation_steps: int  # steps of one update
    trials: tuple[Run, ...]  # in the order they were tried
    stopped_by: StoppedBy  # what ended the growth
    limit: MemoryLimit | None  # of a process; None where nothing was known
    allowed_bytes: int | None  # what of it a trial may take
    replicas: int = 1
    data_batch_size: int | None = None  # examples of a batch of the data
    target_batch_size: int | None = None  # examples of one update, as asked for

    @property
    def effective_batch_size(self) -> int:
        """Examples of one update."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change in the training script, one sentence or two each."""
        size, each = self.batch_size, ""
        if self.replicas > 1:
            part = size // self.replicas
            each = f" ({part:,} on each of {self.replicas} replicas)"
        lines = [f"Make batches of {size:,}{each}, as by `.batch({size})`."]
        steps, effective = self.gradient_accumulation_steps, self.effective_batch_size
        if steps > 1:
            target = self.target_batch_size
            rest = "" if target == effective else f", not {target:,}"
            lines.append(
                f"Add up {steps} of them to one update of {effective:,} examples{rest}"
                ": `tfamp.LossScaleOptimizer(optimizer, "
                f"gradient_accumulation_steps={steps})`."
            )
        base = self.data_batch_size
        if base is not None and base != effective:
            lines.append(
                f"The learning rate belongs to updates of {base:,} examples. Take "
                "`tfamp.training.scale_learning_rate(learning_rate, batch_size="
                f'{effective}, base_batch_size={base})`, with `rule="sqrt"` for Adam.'
            )
        return tuple(lines)

    def table(self) -> str:
        """Returns the choice and why, the trials by batch size, and the advice."""
        title = f"{self.model}, {self.policy}"
        if self.limit is not None and self.allowed_bytes is not None:
            title += f"; limit {format_bytes(self.allowed_bytes)}: {self.limit.source}"
        numbers = ("batch size", "examples/s", "step", "peak memory")
        rows = []
        for trial in sorted(self.trials, key=lambda trial: trial.batch_size):
            speed, step = trial.examples_per_second, trial.step_seconds
            is_chosen = trial.fits and trial.batch_size == self.batch_size
            rows.append(
                (
                    f"{trial.batch_size:,}",
                    format_rate(speed).removesuffix(" examples/s") if speed else "",
                    format_seconds(step) if step else "",
                    format_bytes(trial.peak_bytes) if trial.peak_bytes else "",
                    trial.outcome + ", chosen" * is_chosen,
                )
            )
        columns = {**dict.fromkeys(numbers, console.RIGHT), "outcome": console.FOLD}
        most = max(trial.batch_size for trial in self.trials if trial.fits)
        why = _WHY[self.stopped_by]
        if (
            self.batch_size < most
            and not self.target_batch_size
            and (self.stopped_by != "knee")
        ):
            why = f"of those up to {most:,} none is much faster"
        lines = [
            *console.wrapped(f"Batch size {self.batch_size:,}: {why}."),
            *console.wrapped(title),
            console.text_of(console.table(columns, rows)),
        ]
        for sentence in self.advice:
            lines += console.wrapped(f"- {sentence}", indent=2)
        return "\n".join(lines)


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
) -> BatchSearch:
    """Searches for the smallest batch that trains about as fast as any that fits.

    Each size is trained a few steps by `fit` in a fresh process, some ten seconds each.
    It doubles until it does not fit, is half of the data, or gains too little speed
    twice in a row; where memory ends it, multiples of 8 between are tried too.

    On a GPU use it from a process that has not used the GPU yet, with a function as
    `data`: TensorFlow takes all of its memory and would leave none to the trials.

    Args:
        build_model: Returns a compiled model, or (model, train) where no data is
            passed, in each trial; a strategy belongs into it. Or "module:function".
        data: What `fit` takes, or a function that returns it. The rows of its first
            batch are repeated to the size that is tried.
        policy: What to build under, as in `tfamp.compare`; None takes that in force.
        max_memory_bytes: The most that a process, or TensorFlow on a GPU, may hold, of
            which a tenth stays free. What the machine has holds too.
        start: The first size, of all replicas; halved where it does not fit.
        max_batch_size: The largest size to try; None for 2**20.
        min_gain: Part by which a doubled batch has to be faster; None takes the largest
            batch that fits, however fast.
        target_batch_size: Examples of one update to keep to, in so many steps as it
            takes. The memory for adding up gradients is then held in the trials.

    Raises:
        MemoryError: Not even one example for each replica fits.
        RuntimeError: A trial failed, and not for want of memory; its log is told.
        TimeoutError: Not even one example for each replica is trained in 600 s.
        TypeError: An argument has the wrong type, or cannot go to another process.
        ValueError: An argument is out of range, or the data is empty.

    Example:
        >>> find_batch_size(build_model, data).batch_size  # doctest: +SKIP
        256
    """
    title = parcel.name_of(build_model)
    most = checks.positive_int("max_batch_size", max_batch_size or _MAX_BATCH_SIZE)
    caps: dict[StoppedBy, int] = {"max_batch_size": most}
    if target_batch_size is not None:
        target = checks.positive_int("target_batch_size", target_batch_size)
        caps["target_batch_size"] = target
    start = min(checks.positive_int("start", start), *caps.values())
    if min_gain is not None:
        checks.fraction("min_gain", min_gain)
    limit = memory_limit(max_memory_bytes)
    allowed = None if limit is None else int(limit.free_bytes * (1 - _MARGIN))
    batch = None if data is None or callable(data) else parcel.batch_of(data)
    with (
        tempfile.TemporaryDirectory(prefix="tfamp-batch-size-") as name,
        console.progress("Trying batch sizes", unit="trials") as show,
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
        search = _Search(folder, task, caps, min_gain, show)
        search.run(start)
        fitting = [trial for trial in search.trials.values() if trial.fits]
        if not fitting:
            smallest = min(search.trials.values(), key=lambda each: each.batch_size)
            raise _none_fits(smallest, limit, title)
        # The least that is about as fast as the fastest; else the largest.
        fastest = max(trial.examples_per_second for trial in fitting)
        least = 0.0 if min_gain is None else (1 - min_gain) * fastest
        good = [t.batch_size for t in fitting if t.examples_per_second >= least]
        size, steps = search.split(max(good) if min_gain is None else min(good))
    return BatchSearch(
        model=search.last.model,
        policy=task.policy,
        batch_size=size,
        gradient_accumulation_steps=steps,
        trials=tuple(search.trials.values()),
        stopped_by=search.stopped_by,
        limit=limit,
        allowed_bytes=allowed,
        replicas=search.last.replicas,
        data_batch_size=search.last.data_batch_size,
        target_batch_size=target_batch_size,
    )


@dataclasses.dataclass
class _Search:
    """Trials by size, which double, and are narrowed down where memory ends that."""

    folder: Path
    task: Task
    caps: dict[StoppedBy, int]
    min_gain: float | None
    show: Callable[[int], None]
    trials: dict[int, Run] = dataclasses.field(default_factory=dict)
    last: Run = dataclasses.field(default_factory=lambda: Run("", 0))
    stopped_by: StoppedBy = "max_batch_size"

    def run(self, start: int) -> None:
        """Tries sizes from the first on; it may be another, as the data allow it."""
        first = self._try(start)
        size, replicas = first.batch_size, first.replicas
        if number := first.num_examples:  # at least two batches make up the data
            self.caps["data"] = possible_size(max(number // 2, 1), replicas, None)
        self.stopped_by, cap = min(self.caps.items(), key=lambda item: item[1])
        good = size if first.fits else 0
        if first.fits:
            good = self._grown(size, cap)
        else:
            self.stopped_by = _ended_by(first)
        bad = max((s for s, t in self.trials.items() if not t.fits), default=0)
        # Of a model that is not even built no other size is worth a trial.
        while not good and self.trials[bad].model and bad >= 2 * replicas:
            smaller = bad // 2 // replicas * replicas
            good, bad = (smaller, bad) if self._try(smaller).fits else (0, smaller)
        # Among small sizes every one counts.
        unit = replicas if good < 8 else math.lcm(8, replicas)
        while good and bad - good > max(unit, _PRECISION * good):
            middle = (good + bad) // 2 // unit * unit
            if middle <= good:
                break
            good, bad = (middle, bad) if self._try(middle).fits else (good, middle)

    def split(self, size: int) -> tuple[int, int]:
        """Returns a size that fits, and how many steps make up the target with it."""
        target, replicas = self.task.target_batch_size, self.last.replicas
        if target is None:
            return size, 1
        fewest = math.ceil(target / size)
        numbers = range(fewest, 2 * fewest + 1)
        even = [(target // n, n) for n in numbers if target % (n * replicas) == 0]
        nearest = max(1, round(target / fewest / replicas)) * replicas
        for each, steps in (*even[:1], (nearest, fewest)):
            if self._try(each).fits:
                return each, steps
        return size, fewest

    def _grown(self, good: int, cap: int) -> int:
        """Doubles a size until it does not fit or pay; returns the last that fits."""
        flat, unit = 0, math.lcm(8, self.last.replicas)
        # An update of exactly the target is worth more than a multiple of 8.
        if self.stopped_by == "target_batch_size" or cap < 2 * unit:
            unit = self.last.replicas
        cap = cap // unit * unit
        while good < cap and flat < _MAX_FLAT:
            larger = min(2 * good, cap)
            trial = self._try(larger)
            if not trial.fits:
                self.stopped_by = _ended_by(trial)
                break
            speeds = [self.trials[s].examples_per_second for s in (good, larger)]
            gain = -1.0 if self.min_gain is None else self.min_gain
            is_flat = speeds[1] < speeds[0] * (1 + gain)
            flat = flat + 1 if is_flat and larger == 2 * good else 0
            good = larger
        if flat == _MAX_FLAT:
            self.stopped_by = "knee"
        return good

    def _try(self, size: int) -> Run:
        """Returns the trial of a size, or of what the data and replicas make of it."""
        if size not in self.trials:
            task = dataclasses.replace(self.task, batch_size=size)
            found = try_size(self.folder, task)
            self.last = found if found.model else self.last
            size = found.batch_size
            self.trials[size] = found
            self.show(len(self.trials))
        return self.trials[size]


def try_size(
    folder: Path, task: Task, environment: Mapping[str, str] | None = None
) -> Run:
    """Tries a size in a fresh process; without a model's name it was not even built."""
    run = runner.do(
        folder, task, timeout_seconds=_TIMEOUT_SECONDS, environment=environment
    )
    log, outcome = folder / f"{task.name}.log", run.outcome
    if outcome.startswith("status "):
        # The kernel kills by SIGKILL. C++ ends a process by SIGABRT or SIGSEGV for many
        # reasons, so there the end of the log has to speak of memory.
        lines = runner.tail(log, 200).splitlines()
        errors = [RuntimeError(line) for line in lines if _HARMLESS not in line]
        is_memory = any(map(is_out_of_memory, errors))
        is_killed = outcome == f"status {-signal.SIGKILL}"
        outcome = "killed" if is_killed else "out of memory" if is_memory else ""
    if not outcome:
        raise RuntimeError(
            f"The trial of batch size {task.batch_size} failed, and not for want of "
            f"memory: {run.error}. Expected `build_model` and its data to train; mend "
            f"what the log ends with:\n{runner.tail(log)}"
        )
    size = run.batch_size or task.batch_size or 1
    return dataclasses.replace(run, outcome=outcome, batch_size=size)


def policy_in_force(folder: Path) -> str:
    """Returns the policy in force as a variant's word; a plan becomes a file."""
    settings = IN_FORCE.settings
    if settings is None:
        return str(Variant(keras.config.dtype_policy().name, is_stock=True))
    if settings.plan is not None:
        return str(plan_file(folder, settings.plan))
    return str(settings.policy.name)


def _ended_by(trial: Run) -> StoppedBy:
    return "time" if trial.outcome == "too slow" else "memory"


def _none_fits(trial: Run, limit: MemoryLimit | None, title: str) -> Exception:
    """Returns the error that says that not even the smallest size fits."""
    what = f"The model of {title!r} is not even built"
    if trial.model:
        what = f"Not even batch size {trial.batch_size} of {title!r} is trained"
    why = f" ({trial.error})" if trial.error else ""
    if trial.outcome == "too slow":
        return TimeoutError(
            f"{what} in time{why}; expected a few steps to end within "
            f"{_TIMEOUT_SECONDS:g} s. Shorten the inputs, or shrink the model."
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
    """Returns the memory that a fresh process may take, and what decides it."""
    here, found = machine_memory(), []
    if max_memory_bytes is not None:
        most = checks.positive_int("max_memory_bytes", max_memory_bytes)
        found.append(MemoryLimit(most, "max_memory_bytes"))
    if tf.config.get_visible_devices("GPU"):
        found += [
            MemoryLimit(each.memory_total_bytes, "GPU memory", each.memory_used_bytes)
            for each in here.gpus
            if each.memory_total_bytes is not None
        ]
    else:
        found += here.limits
    return min(found, key=lambda limit: limit.free_bytes, default=None)
