"""NVIDIA's figures of the GPUs that TensorFlow uses: load, memory, power, energy."""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.machine.visible_gpus import handles_of
from tfamp.records import checks
from tfamp.records.record import Record

_MIG = re.compile(r"\bMIG (\S+)")
_GPU_NAME = "/physical_device:GPU:"


@dataclasses.dataclass(frozen=True)
class GpuReading(Record):
    """Figures of a GPU at one moment; None where the driver does not tell.

    On a MIG slice memory is the slice's own; temperature, power and energy are those
    of the whole GPU, other users' slices included, and load is not told.

    Args:
        index: Its number in TensorFlow, as in "GPU:0".
        name: The maker's name.
        mig_slice: Name of the slice of a GPU, such as "1g.5gb"; None for a whole one.
        utilisation: Part of the last sampling period (up to a second) in which a
            kernel ran, in [0, 1]; it does not say how much of the GPU it filled.
        memory_used_bytes: In use by all processes; TensorFlow reserves most at once
            unless memory growth is on.
        memory_total_bytes: Size of the memory.
        temperature_celsius: Of the chip.
        power_watts: Drawn now.
        energy_joules: Used since some moment in the past: subtract two readings.
        energy_source: "counter" of the GPU itself, or "power" summed over the time
            between readings, which needs them to be close.
    """

    index: int
    name: str
    mig_slice: str | None = None
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    energy_source: str | None = None


class Nvml:
    """Reads the GPUs that TensorFlow sees in this process.

    Only those: the others of the machine compute for somebody else. Close it, or use
    it in a `with` block. A query that fails gives None for its field.

    Args:
        pynvml: The module of nvidia-ml-py; None imports it.
        gpus: Number and name of each GPU that TensorFlow uses; None asks TensorFlow,
            without starting the GPUs.
        environ: Where CUDA_VISIBLE_DEVICES stands.
        clock: Gives seconds.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        RuntimeError: There is no GPU, or no driver that answers.
    """

    def __init__(
        self,
        pynvml: Any = None,
        *,
        gpus: Sequence[tuple[int, str]] | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        gpus = visible_gpus() if gpus is None else gpus
        if not gpus:
            raise RuntimeError("TensorFlow sees no GPU, so NVML has nothing to read.")
        self._pynvml: Any = pynvml or checks.require(
            "pynvml", extra="gpu", purpose="Figures of the GPU"
        )
        self._clock = clock
        self._summed: dict[int, _Summed] = {}
        self._counting: set[int] = set()
        self._handles: dict[int, tuple[Any, Any]] = {}
        try:
            self._pynvml.nvmlInit()
        except self._pynvml.NVMLError as error:
            raise RuntimeError(
                f"NVML does not answer ({error}); expected NVIDIA's driver. Run "
                "`nvidia-smi`, and in a container start it with the GPU's driver files."
            ) from error
        self._is_open = True
        try:
            self._handles = handles_of(self._pynvml, gpus, environ)
            if not self._handles:
                raise RuntimeError(
                    f"NVML knows none of TensorFlow's GPUs {tuple(gpus)!r}; expected "
                    "NVIDIA's, as listed by `nvidia-smi -L`."
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, pynvml: Any = None, **options: Any) -> "Nvml | None":
        """Returns a reader, or None where it cannot be had (no GPU, no NVML).

        Args:
            pynvml: As for the class.
            **options: As for the class.
        """
        try:
            return cls(pynvml, **options)
        except (ImportError, RuntimeError):
            return None

    def read(self) -> tuple[GpuReading, ...]:
        """Returns the figures now, a reading for each GPU; about a millisecond each.

        Raises:
            ValueError: It was closed.
        """
        if not self._is_open:
            raise ValueError(
                "This `Nvml` is closed; expected an open one. Make a new `Nvml()`."
            )
        return tuple(
            self._one(index, part, whole)
            for index, (part, whole) in self._handles.items()
        )

    @property
    def handles(self) -> dict[int, tuple[Any, Any]]:
        """Number in TensorFlow -> NVML's handle of what it computes on, of the GPU.

        The two differ on a MIG slice.
        """
        return dict(self._handles)

    def close(self) -> None:
        """Lets NVML go; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            self.ask("nvmlShutdown")

    def __enter__(self) -> "Nvml":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def _one(self, index: int, part: Any, whole: Any) -> GpuReading:
        """Returns the reading of a GPU.

        Args:
            index: Its number in TensorFlow.
            part: What TensorFlow computes on: a GPU, or a MIG slice of one.
            whole: The GPU itself.
        """
        name = _text(self.ask("nvmlDeviceGetName", part) or "GPU")
        found = _MIG.search(name)
        sliced = found.group(1) if found else None
        if part is not whole and sliced is None:
            sliced = "MIG"
        memory = self.ask("nvmlDeviceGetMemoryInfo", part)
        load = self.ask("nvmlDeviceGetUtilizationRates", part)
        sensor = getattr(self._pynvml, "NVML_TEMPERATURE_GPU", 0)
        milliwatts = self.ask("nvmlDeviceGetPowerUsage", whole)
        watts = None if milliwatts is None else milliwatts / 1000
        energy, source = self._energy(index, whole, watts)
        return GpuReading(
            index=index,
            name=name,
            mig_slice=sliced,
            utilisation=None if load is None else load.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_celsius=_number(
                self.ask("nvmlDeviceGetTemperature", whole, sensor)
            ),
            power_watts=watts,
            energy_joules=energy,
            energy_source=source,
        )

    def _energy(
        self, index: int, whole: Any, watts: float | None
    ) -> tuple[float | None, str | None]:
        """Returns joules and where they come from, the same place as before."""
        if index not in self._summed:
            millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption", whole)
            if millijoules is not None:
                self._counting.add(index)
                return millijoules / 1000, "counter"
        if watts is None or index in self._counting:
            return None, None
        summed = self._summed.setdefault(index, _Summed())
        return summed.add(self._clock(), watts), "power"

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer to a query of the library, None where there is none.

        Under MIG, in containers and on consumer GPUs single queries are refused; old
        versions of the library lack some.
        """
        try:
            return getattr(self._pynvml, name)(*arguments)
        except (self._pynvml.NVMLError, AttributeError):
            return None


class _Summed:
    """Energy as the area below the power, joined by straight lines."""

    def __init__(self) -> None:
        self._joules = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, now: float, watts: float) -> float:
        """Returns the joules since the first call."""
        if self._last is not None:
            then, before = self._last
            self._joules += (now - then) * (watts + before) / 2
        self._last = now, watts
        return self._joules


def visible_gpus() -> list[tuple[int, str]]:
    """Returns number and name of each GPU that TensorFlow may use here.

    The number counts the GPUs that CUDA shows, those hidden by
    `tf.config.set_visible_devices` too; the name is "" where it is not told.
    """
    found = []
    for gpu in tf.config.get_visible_devices("GPU"):
        try:
            details = tf.config.experimental.get_device_details(gpu)
        except (ValueError, RuntimeError, tf.errors.OpError):
            details = {}
        number = gpu.name.removeprefix(_GPU_NAME)
        found.append((int(number), details.get("device_name", "")))
    return found


def _text(name: str | bytes) -> str:
    """Returns a name as text; older libraries give bytes."""
    return name.decode() if isinstance(name, bytes) else name


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
