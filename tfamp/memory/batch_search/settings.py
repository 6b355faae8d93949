"""What a trial is made under: memory, policy, devices, strategy, as at the call.

A fresh process knows nothing of `tfamp.enable`, of logical devices or of a strategy's
scope, so they go along as a file.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.settings import RuleSet
from tfamp.machine import limits
from tfamp.machine.limits import MemoryLimit
from tfamp.machine.nvml import Nvml
from tfamp.records import checks
from tfamp.trials.variant import Variant, in_force

GPU, CALLER = "GPU memory", "max_memory_bytes"
_ROOT = Path("/")
FILE = "settings.pickle"
_PURPOSE = "`tfamp.find_batch_size`"


def memory_limit(
    max_memory_bytes: int | None = None,
    *,
    has_gpu: bool | None = None,
    gpu: Callable[[], MemoryLimit | None] | None = None,
    root: Path = _ROOT,
    address_space: Callable[[], int | None] | None = None,
) -> MemoryLimit | None:
    """Returns the memory that a fresh training process may take, and what decides it.

    The one with the least room decides, since a process that passes any of them fails:
    on a GPU the caller's and what is free there; on a CPU the caller's, the machine's
    memory and the cgroups of this process (containers, batch systems), both less what
    is in use, and `ulimit -v`. None where nothing is known, as on a GPU without NVML.
    The other arguments are for tests; None asks the system.
    """
    found = []
    if max_memory_bytes is not None:
        most = checks.positive_int("max_memory_bytes", max_memory_bytes)
        found.append(MemoryLimit(most, CALLER))
    if has_gpu is None:
        has_gpu = bool(tf.config.get_visible_devices("GPU"))
    if has_gpu:
        of_gpu = (gpu or _fullest_gpu)()
        found += [] if of_gpu is None else [of_gpu]
    else:
        found += [
            # Addresses are each process's own; what this one uses is no loss.
            dataclasses.replace(limit, used_bytes=None)
            if limit.source == limits.ADDRESS_SPACE
            else limit
            for limit in limits.memory_limits(root, address_space=address_space)
        ]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


def allowed_bytes(limit: MemoryLimit | None, margin: float) -> int | None:
    """Returns what a trial may take: what is free of a limit, less a margin."""
    return None if limit is None else int(limit.free_bytes * (1 - margin))


def _fullest_gpu() -> MemoryLimit | None:
    nvml = Nvml.open()
    if nvml is None:
        return None
    with nvml:
        readings = nvml.read()
    found = [
        MemoryLimit(each.memory_total_bytes, GPU, each.memory_used_bytes)
        for each in readings
        if each.memory_total_bytes is not None
    ]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of all trials of a search.

    `policy` is a variant's name where the caller named one, else that of what is in
    force; `num_cpus` is 0 where nobody asked for logical CPUs, threads where TensorFlow
    chooses.
    """

    policy: str
    is_named: bool = False
    keras_policy: dict[str, Any] | None = None
    rules: RuleSet | None = None
    loss_scale: str | float | None = None
    loss_scale_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
        around: dict[str, Any] = {
            "replicas": _replicas(tf.distribute.get_strategy()),
            "num_cpus": _num_cpus(),
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
        return cls(
            settings.policy.name,
            rules=settings.rules,
            loss_scale=settings.loss_scale,
            loss_scale_options=dict(settings.loss_scale_options),
            **around,
        )

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
        (folder / FILE).write_bytes(text)

    @staticmethod
    def read(folder: Path) -> "Settings":
        """Returns the settings that were written."""
        pickle = checks.require("cloudpickle", extra="report", purpose=_PURPOSE)
        found: Settings = pickle.loads((folder / FILE).read_bytes())
        return found

    def prepare_devices(self, gpu_bytes: int | None = None) -> None:
        """Gives this process the logical devices and threads, before TensorFlow starts.

        TensorFlow may take `gpu_bytes` on each GPU, None for its own way.
        """
        for number, set_threads in zip(
            self.threads,
            (
                tf.config.threading.set_intra_op_parallelism_threads,
                tf.config.threading.set_inter_op_parallelism_threads,
            ),
            strict=True,
        ):
            if number:
                set_threads(number)
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
            elif self.rules is not None:
                stack.enter_context(tfamp.scope(self.policy, keep_float32="none"))
                self._complete(IN_FORCE.settings)
            else:
                before = keras.config.dtype_policy()
                stack.callback(keras.config.set_dtype_policy, before)
                keras.config.set_dtype_policy(
                    keras.saving.deserialize_keras_object(self.keras_policy)
                )
            if self.replicas:
                strategy = tf.distribute.MirroredStrategy(list(self.replicas))
                stack.enter_context(strategy.scope())
            yield

    def _complete(self, settings: Any) -> None:
        """Gives settings what `tfamp.scope` takes only in the caller's own words."""
        settings.rules = self.rules
        settings.loss_scale = self.loss_scale
        settings.loss_scale_options = dict(self.loss_scale_options)


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


def _num_cpus() -> int:
    """Returns how many logical CPU devices somebody asked for, 0 for none."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or ())
