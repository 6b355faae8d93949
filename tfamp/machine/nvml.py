"""NVIDIA's figures of the GPUs that TensorFlow uses: load, memory, power, energy.

NVML lists all GPUs of the machine in the order of their slots. CUDA shows those that
CUDA_VISIBLE_DEVICES names, in its order, and of a GPU cut by MIG one slice.
"""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.records import checks
from tfamp.records.record import Record

_MIG = re.compile(r"\bMIG (\S+)")


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


class _Part(NamedTuple):
    """A GPU, or a MIG slice of one: NVML's handles of it and of the whole GPU."""

    handle: Any
    whole: Any
    slot: int  # of the GPU, in NVML's order
    uuid: str
    name: str


class Nvml:
    """Reads the GPUs that TensorFlow sees in this process.

    Only those: the others of the machine compute for somebody else. Close it, or use
    it in a `with` block. A query that fails gives None for its field. An ImportError
    says that nvidia-ml-py is not installed, a RuntimeError that no GPU answers.

    Args:
        pynvml: The module of nvidia-ml-py; None imports it.
        gpus: Number and name of each GPU that TensorFlow uses; None asks TensorFlow,
            without starting the GPUs.
        environ: Where CUDA_VISIBLE_DEVICES stands.
        clock: Gives seconds.

    Attributes:
        handles: Number in TensorFlow -> NVML's handle of what it computes on, and of
            the whole GPU. The two differ on a MIG slice.
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
        # Joules, and the time and power of the last reading, where power is summed.
        self._summed: dict[int, tuple[float, float, float]] = {}
        self._counting: set[int] = set()
        try:
            self._pynvml.nvmlInit()
        except self._pynvml.NVMLError as error:
            raise RuntimeError(
                f"NVML does not answer ({error}); expected NVIDIA's driver. Run "
                "`nvidia-smi`, and in a container start it with the GPU's driver files."
            ) from error
        self._is_open = True
        try:
            listed = environ.get("CUDA_VISIBLE_DEVICES")
            self.handles = _handles_of(list(self._parts()), gpus, listed)
            if not self.handles:
                raise RuntimeError(
                    f"NVML knows none of TensorFlow's GPUs {tuple(gpus)!r}; expected "
                    "NVIDIA's, as listed by `nvidia-smi -L`."
                )
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, pynvml: Any = None, **options: Any) -> "Nvml | None":
        """Returns a reader, or None where it cannot be had (no GPU, no NVML)."""
        try:
            return cls(pynvml, **options)
        except (ImportError, RuntimeError):
            return None

    def read(self) -> tuple[GpuReading, ...]:
        """Returns the figures now, a reading for each GPU; about a millisecond each."""
        if not self._is_open:
            raise ValueError(
                "This `Nvml` is closed; expected an open one. Make a new `Nvml()`."
            )
        return tuple(self._one(index, *both) for index, both in self.handles.items())

    def close(self) -> None:
        """Lets NVML go; a second time does nothing."""
        if self._is_open:
            self._is_open = False
            self.ask("nvmlShutdown")

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer to a query of the library, None where there is none.

        Under MIG, in containers and on consumer GPUs single queries are refused; old
        versions of the library lack some.
        """
        try:
            answer = getattr(self._pynvml, name)(*arguments)
        except (self._pynvml.NVMLError, AttributeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def _parts(self) -> Iterator[_Part]:
        """Yields all GPUs, and the slices in place of one that is cut."""
        for slot in range(self.ask("nvmlDeviceGetCount") or 0):
            whole = self.ask("nvmlDeviceGetHandleByIndex", slot)
            if whole is None:
                continue
            count = self.ask("nvmlDeviceGetMaxMigDeviceCount", whole) or 0
            slices = (
                self.ask("nvmlDeviceGetMigDeviceHandleByIndex", whole, index)
                for index in range(count)
            )
            for handle in [each for each in slices if each is not None] or [whole]:
                uuid = self.ask("nvmlDeviceGetUUID", handle) or ""
                name = self.ask("nvmlDeviceGetName", handle) or ""
                yield _Part(handle, whole, slot, uuid, name)

    def _one(self, index: int, part: Any, whole: Any) -> GpuReading:
        name = self.ask("nvmlDeviceGetName", part) or "GPU"
        found = _MIG.search(name)
        sliced = found.group(1) if found else None
        if part is not whole and sliced is None:
            sliced = "MIG"
        memory = self.ask("nvmlDeviceGetMemoryInfo", part)
        load = self.ask("nvmlDeviceGetUtilizationRates", part)
        sensor = getattr(self._pynvml, "NVML_TEMPERATURE_GPU", 0)
        celsius = self.ask("nvmlDeviceGetTemperature", whole, sensor)
        milliwatts = self.ask("nvmlDeviceGetPowerUsage", whole)
        watts = None if milliwatts is None else milliwatts / 1000
        return GpuReading(
            index,
            name,
            sliced,
            None if load is None else load.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if celsius is None else float(celsius),
            watts,
            *self._energy(index, whole, watts),
        )

    def _energy(
        self, index: int, whole: Any, watts: float | None
    ) -> tuple[float | None, str | None]:
        """Returns joules and where they come from, the same place as before.

        Without a counter energy is the area below the power, joined by straight lines.
        """
        if index not in self._summed:
            millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption", whole)
            if millijoules is not None:
                self._counting.add(index)
                return millijoules / 1000, "counter"
        if watts is None or index in self._counting:
            return None, None
        now = self._clock()
        joules, then, before = self._summed.get(index, (0.0, now, watts))
        joules += (now - then) * (watts + before) / 2
        self._summed[index] = joules, now, watts
        return joules, "power"


def visible_gpus() -> list[tuple[int, str]]:
    """Returns number and name of each GPU that TensorFlow may use here.

    The number counts the GPUs that CUDA shows, those hidden by
    `tf.config.set_visible_devices` too; the name is "" where it is not told.
    """
    return [
        (number_of(gpu), details_of(gpu).get("device_name", ""))
        for gpu in tf.config.get_visible_devices("GPU")
    ]


def number_of(gpu: Any) -> int:
    """Returns the number of one of TensorFlow's physical devices."""
    return int(gpu.name.rsplit(":", 1)[1])


def details_of(device: Any) -> dict[str, Any]:
    """Returns TensorFlow's details of a device, {} where it has none to give."""
    try:
        return dict(tf.config.experimental.get_device_details(device))
    except (ValueError, RuntimeError, tf.errors.OpError):
        return {}


def _handles_of(
    parts: Sequence[_Part], gpus: Sequence[tuple[int, str]], listed: str | None
) -> dict[int, tuple[Any, Any]]:
    """Returns for each GPU of TensorFlow its NVML handle and that of the whole GPU.

    CUDA puts the fastest GPU first unless CUDA_DEVICE_ORDER says otherwise, so where
    the names disagree they decide, and not the place.
    """
    shown = _visible(parts, listed)
    found: dict[int, tuple[Any, Any]] = {}
    free = [*shown, *(part for part in parts if part not in shown)]
    for number, name in gpus:
        named = [part for part in free if name and part.name == name]
        at_place = [part for part in shown[number : number + 1] if part in free]
        # The one at the place, if it has the name or none of the free has.
        chosen = [part for part in at_place if part in named] or named or at_place
        if chosen:
            free.remove(chosen[0])
            found[number] = (chosen[0].handle, chosen[0].whole)
    return found


def _visible(parts: Sequence[_Part], listed: str | None) -> list[_Part]:
    """Returns what CUDA shows, in its order.

    `listed` is CUDA_VISIBLE_DEVICES: numbers, or the beginnings of UUIDs. The list ends
    at the first entry that names nothing.

    Source: NVIDIA, CUDA C++ Programming Guide, section "CUDA Environment Variables";
    MIG User Guide, section "CUDA Visible Devices".
    """
    by_slot: dict[int, _Part] = {}
    for part in parts:
        by_slot.setdefault(part.slot, part)
    if listed is None:
        return list(by_slot.values())
    found: list[_Part] = []
    for entry in map(str.strip, listed.split(",")):
        if entry.isdecimal():
            named = by_slot.get(int(entry))
        else:
            with_it = (p for p in parts if entry and p.uuid.startswith(entry))
            named = next(with_it, None)
        if named is None:
            break
        found.append(named)
    return found
