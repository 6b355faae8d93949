"""A trial seen from outside: what goes to its process, and how that ended.

A fresh process knows nothing of `tfamp.enable`, of logical devices or of a strategy's
scope, so they go along as a file.
"""

import contextlib
import dataclasses
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp.dtypes.in_force import IN_FORCE, stock_policy
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.memory.batch_search.records import Outcome, Trial
from tfamp.records import checks
from tfamp.trials import processes, runner
from tfamp.trials.tasks import SETTINGS, Facts, Task
from tfamp.trials.variant import Variant, in_force

# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"
# A thread whose stack finds no room, as under `ulimit -v`.
_NO_STACK = re.compile(r"pthread_create(\(\))? failed")
# Of a log, what is looked through for words of memory.
_LOG_CHARACTERS = 20_000
_PURPOSE = "`tfamp.find_batch_size`"
# Of the settings in force, what decides beside the policy.
_HELD = ("rules", "loss_scale", "loss_scale_options", "plan", "jit_compile")


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
        """Writes them for the trials, which read them as they are.

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
        (folder / SETTINGS).write_bytes(text)

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


def try_size(folder: Path, task: Task, *, timeout_seconds: float) -> Trial:
    """Tries a batch size in a fresh process, as data and replicas allow it.

    Raises:
        RuntimeError: The process failed, and not for want of memory.
    """
    log, told = folder / f"{task.name}.log", folder / f"{task.name}.facts"
    told.unlink(missing_ok=True)
    run = runner.do(folder, task, timeout_seconds=timeout_seconds)
    facts = Facts.from_json(told) if told.is_file() else None
    size = task.batch_size if facts is None else facts.batch_size
    outcome, detail = run.outcome, run.error
    if outcome == "too slow":
        detail = f"It was ended after {timeout_seconds:g} s."
    elif outcome.startswith("status "):
        text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        outcome = of_status(int(outcome.removeprefix("status ")), text) or ""
    if not outcome:
        raise RuntimeError(
            f"The trial of batch size {size} failed, and not for want of memory: "
            f"{detail}. Expected `build_model` and its data to train; mend what the "
            f"log ends with:\n{processes.tail(log)}"
        )
    memory, step = run.memory, run.step
    peak = None if memory is None else memory.device_bytes or memory.training_bytes
    return Trial(
        *(size or 1, outcome),  # type: ignore[arg-type]
        examples_per_second=run.examples_per_second or None,
        step_seconds=None if step is None else step.median,
        first_step_seconds=run.first_step_seconds or None,
        peak_bytes=peak,
        began_training=facts is not None,
        detail=detail,
    )


def facts_of(folder: Path, task: Task) -> Facts | None:
    """Returns what a trial told before it trained, None if it did not."""
    file = folder / f"{task.name}.facts"
    return Facts.from_json(file) if file.is_file() else None
