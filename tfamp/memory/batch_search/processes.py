"""A trial seen from outside: what goes to its process, and how that ended.

A fresh process knows nothing of `tfamp.enable`, of logical devices or of a strategy's
scope, so they go along as a file.
"""

import contextlib
import dataclasses
import errno
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import keras
import tensorflow as tf

import tfamp
from tfamp.data._elements import known_length
from tfamp.dtypes.in_force import IN_FORCE, stock_policy
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.memory.batch_search.records import Outcome, Trial
from tfamp.memory.batch_search.search import TrialFacts
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.stepping.arguments import arrays_of, dataset_of, first_batch
from tfamp.trials import processes
from tfamp.trials.variant import Variant, in_force

# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"
# A thread whose stack finds no room, as under `ulimit -v`.
_NO_STACK = re.compile(r"pthread_create(\(\))? failed")
_XLA = re.compile(r"\bxla|hlo|while trying to allocate", re.IGNORECASE)
# What a trial leaves: facts before it trains, and its answer; and what it gets.
FACTS, ANSWER = "facts.json", "answer.json"
_SETTINGS = "settings.pickle"
FILES = (FACTS, ANSWER, _SETTINGS)
MODULE = "tfamp.memory.batch_search.trial"
# Of a log, what is looked through for words of memory.
_LOG_CHARACTERS = 20_000
_PURPOSE = "`tfamp.find_batch_size`"
# Of the settings in force, what decides beside the policy.
_HELD = ("rules", "loss_scale", "loss_scale_options", "plan", "jit_compile")
# What `fit` takes of arrays by default, and how many rows of them a trial gets.
_FIT_BATCH_SIZE = 32
_MAX_ROWS = 1024


def of_error(error: BaseException) -> Outcome | None:
    """Returns how a trial that raised this ended, None if not for want of memory."""
    seen: BaseException | None = error
    while seen is not None:
        is_refused = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        if isinstance(seen, MemoryError) or is_refused:
            return "MemoryError"
        if is_out_of_memory(seen):
            if _XLA.search(str(seen)):
                return "XLA out of memory"
            is_exhausted = isinstance(seen, tf.errors.ResourceExhaustedError)
            return "ResourceExhaustedError" if is_exhausted else "out of memory"
        seen = seen.__cause__
    return None


def of_status(status: int, log: str) -> Outcome | None:
    """Returns how a process without an answer ended, None if not for want of memory.

    The kernel kills by SIGKILL. C++ ends a process by SIGABRT or SIGSEGV for many
    reasons, so there the end of the log has to speak of memory.
    """
    if status == -signal.SIGKILL:
        return "killed"
    lines = [line for line in log.splitlines() if _HARMLESS not in line]
    if any(is_out_of_memory(RuntimeError(x)) or _NO_STACK.search(x) for x in lines):
        return "killed" if status < 0 else "out of memory"
    return None


@dataclasses.dataclass(frozen=True)
class TrialSettings(Record):
    """The settings of a search that its trials need.

    Args:
        title: What is trained.
        steps: Steps to time, at least.
        allowed_bytes: What a trial may hold; None where there is no limit.
        target_batch_size: Examples of one update, None where that is left open.
        data_batch_size: Examples of a batch of the data; None where only
            `build_model` or a function knows it.
        num_examples: Examples of the data, None where that is not known.
    """

    FILE: ClassVar[str] = "plan.json"

    title: str
    steps: int
    allowed_bytes: int | None = None
    target_batch_size: int | None = None
    data_batch_size: int | None = None
    num_examples: int | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of all trials of a search.

    `policy` is a variant's name where the caller named one, else that of what is in
    force, of which `held` has the rest; `num_cpus` is 0 where nobody asked for logical
    CPUs, threads where TensorFlow chooses.
    """

    policy: str
    is_named: bool = False
    keras_policy: dict[str, Any] | None = None
    held: dict[str, Any] | None = None
    replicas: tuple[str, ...] = ()
    num_cpus: int = 0
    threads: tuple[int, int] = (0, 0)

    @property
    def variant(self) -> Variant:
        """The variant that was named; of the rest only that it changes nothing."""
        return Variant.parse(self.policy if self.is_named else "float32", "policy")

    @classmethod
    def present(cls, policy: str | None) -> "Settings":
        """Returns the settings of this process, or a variant in place of its policy.

        Raises:
            TypeError: The policy is no text.
            ValueError: It is unknown, or the open strategy cannot be had elsewhere.
        """
        threading = tf.config.threading
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = tf.config.get_logical_device_configuration(cpu)
        around: dict[str, Any] = {
            "replicas": _replicas(tf.distribute.get_strategy()),
            "num_cpus": len(parts or ()),
            "threads": (
                threading.get_intra_op_parallelism_threads(),
                threading.get_inter_op_parallelism_threads(),
            ),
        }
        if policy is not None:
            return cls(str(Variant.parse(policy, "policy")), True, **around)
        settings = IN_FORCE.settings
        if settings is None:
            stock = keras.config.dtype_policy()
            config = keras.saving.serialize_keras_object(stock)
            return cls(stock.name, keras_policy=config, **around)
        held = {name: getattr(settings, name) for name in _HELD}
        return cls(settings.policy.name, held=held, **around)

    def write(self, folder: Path) -> None:
        """Writes them for the trials.

        Raises:
            TypeError: A rule cannot be taken to another process.
        """
        pickle = checks.require("cloudpickle", extra="report", purpose=_PURPOSE)
        try:
            text: bytes = pickle.dumps(self)
        except Exception as error:  # a callable holds whatever its author liked
            raise TypeError(
                "`keep_float32`, as it is in force, cannot be taken to another process "
                f"({type(error).__name__}: {error}); expected classes, names, patterns "
                "and plain functions. Take out what holds a model or an open file."
            ) from error
        (folder / _SETTINGS).write_bytes(text)

    @staticmethod
    def read(folder: Path) -> "Settings":
        """Returns the settings that were written."""
        pickle = checks.require("cloudpickle", extra="report", purpose=_PURPOSE)
        found: Settings = pickle.loads((folder / _SETTINGS).read_bytes())
        return found

    def prepare_devices(self, gpu_bytes: int | None = None) -> None:
        """Gives this process the logical devices and threads, before TensorFlow starts.

        TensorFlow may take `gpu_bytes` on each GPU, None for its own way.
        """
        intra, inter = self.threads
        if intra:
            tf.config.threading.set_intra_op_parallelism_threads(intra)
        if inter:
            tf.config.threading.set_inter_op_parallelism_threads(inter)
        if self.num_cpus:
            parts = [tf.config.LogicalDeviceConfiguration()] * self.num_cpus
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, parts)
        if gpu_bytes is not None:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=gpu_bytes // 2**20)
            for gpu in tf.config.get_visible_devices("GPU"):
                tf.config.set_logical_device_configuration(gpu, [part])

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Puts policy and strategy in force, and afterwards what was there before."""
        with contextlib.ExitStack() as stack:
            if self.is_named:
                stack.enter_context(in_force(self.variant))
            elif self.held is not None:
                stack.enter_context(tfamp.scope(self.policy, keep_float32="none"))
                # `tfamp.scope` takes them only in the caller's own words.
                for name, value in self.held.items():
                    setattr(IN_FORCE.settings, name, value)
            else:
                policy = keras.saving.deserialize_keras_object(self.keras_policy)
                stack.enter_context(stock_policy(policy))
            if self.replicas:
                strategy = tf.distribute.MirroredStrategy(list(self.replicas))
                stack.enter_context(strategy.scope())
            yield


def _replicas(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the device of each replica, such as "GPU:0"; none without a strategy."""
    if not tf.distribute.has_strategy():
        return ()
    if type(strategy) is not tf.distribute.MirroredStrategy:
        raise ValueError(
            f"A scope of {type(strategy).__name__} is open; expected a "
            "`tf.distribute.MirroredStrategy` or none, since each trial is a process "
            "of its own. Make the strategy inside `build_model`."
        )
    names = strategy.extended.worker_devices
    return tuple(name.split("/device:")[-1] for name in names)


class Batch(NamedTuple):
    """A batch as `fit` takes it, and what is known of the rest.

    `size` counts its examples, of arrays what `fit` takes by default; `num_examples`
    about those of the data, None where that is not known.
    """

    parts: Any
    size: int
    num_examples: int | None


def batch_of(data: Any) -> Batch:
    """Returns one batch of anything that `fit` takes."""
    arrays = arrays_of(data, needs_targets=False)
    if arrays is not None:
        return _of_arrays(arrays)
    dataset = dataset_of(data)
    batch = first_batch(dataset)
    first = tf.nest.flatten(batch)[0]
    size = int(first.shape[0] or tf.shape(first)[0])
    number = known_length(dataset)
    return Batch(batch, size, None if number is None else number * size)


def _of_arrays(data: tuple[Any, ...]) -> Batch:
    numbers = {len(array) for array in tf.nest.flatten(data)}
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError(
            f"The arrays of `data` have {tuple(sorted(numbers))!r} rows; expected the "
            "same number in all of them, and at least one. Pass (x, y), row by row."
        )
    (number,) = numbers
    parts = tf.nest.map_structure(
        lambda each: tf.convert_to_tensor(each[:_MAX_ROWS]), data
    )
    return Batch(parts, min(_FIT_BATCH_SIZE, number), number)


def try_size(folder: Path, size: int, *, timeout_seconds: float) -> Trial:
    """Tries a batch size in a fresh process, as data and replicas allow it.

    Raises:
        RuntimeError: The process failed, and not for want of memory.
    """
    answer, log = folder / ANSWER, folder / f"batch_{size}.log"
    for file in (answer, folder / FACTS):
        file.unlink(missing_ok=True)
    status = _run(folder, size, log, timeout_seconds)
    facts = facts_of(folder)
    began = facts is not None
    size = size if facts is None else facts.batch_size
    if answer.is_file():
        found = json.loads(answer.read_text())
        if found["outcome"] == "error":
            raise RuntimeError(_failed(size, found["detail"], log))
        return Trial(size, **found, began_training=began)
    if status is None:
        detail = f"It was ended after {timeout_seconds:g} s."
        return Trial(size, "too slow", detail=detail, began_training=began)
    text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    outcome = of_status(status, text)
    why = processes.why_ended(status)
    if outcome is None:
        raise RuntimeError(_failed(size, why, log))
    return Trial(size, outcome, detail=why, began_training=began)


def facts_of(folder: Path) -> TrialFacts | None:
    """Returns what the last trial told before it trained, None if it did not."""
    file = folder / FACTS
    return TrialFacts.from_json(file) if file.is_file() else None


def _run(folder: Path, size: int, log: Path, timeout_seconds: float) -> int | None:
    """Returns the status of the trial's process, None where it took too long."""
    # Its input is held open: the end of it tells the trial that this process is gone.
    process = processes.start(MODULE, [str(folder), str(size)], log)
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
        processes.close_input(process)


def _failed(size: int, why: str, log: Path) -> str:
    return (
        f"The trial of batch size {size} failed, and not for want of memory: {why}. "
        "Expected `build_model` and its data to train; mend what the log ends with:\n"
        f"{processes.tail(log)}"
    )
