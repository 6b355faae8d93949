"""What is read of the machine: the process by psutil, the GPUs by NVML."""

import time
from collections.abc import Callable
from typing import Any

from tfamp.machine.nvml import GpuReading, Nvml, visible_gpus
from tfamp.records import checks

Reader = Callable[[], dict[str, float | None]]

# Of a reading of a GPU, what goes into rows, by the name it has there.
_GPU_FIGURES = {
    "utilisation": "utilisation",
    "memory_bytes": "memory_used_bytes",
    "temperature_celsius": "temperature_celsius",
    "power_watts": "power_watts",
    "energy_joules": "energy_joules",
}
# Load over less time than this is a matter of luck.
_MIN_LOAD_SECONDS = 0.1


class ProcessReader:
    """Reads CPU and memory of this process, by psutil.

    `cpu_percent` is of one core, since the reading before: 200 is two cores at work, by
    all threads of the process.
    """

    def __init__(
        self, psutil: Any = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        psutil = psutil or checks.require(
            "psutil", extra="report", purpose="CPU and memory of `DeviceStats`"
        )
        self._process, self._clock = psutil.Process(), clock
        self._percent: float | None = None
        self._last = self._clock(), self._cpu_seconds()

    def __call__(self) -> dict[str, float | None]:
        """Returns the figures now, by name."""
        now, cpu = self._clock(), self._cpu_seconds()
        then, before = self._last
        if now - then >= _MIN_LOAD_SECONDS:
            self._percent = 100 * (cpu - before) / (now - then)
            self._last = now, cpu
        return {
            "cpu_percent": self._percent,
            "process_bytes": float(self._process.memory_info().rss),
        }

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class GpuReader:
    """Reads the GPUs that TensorFlow uses; energy counts from the first reading on.

    `names` has what is read, such as "gpu0_power_watts"; a figure that the driver does
    not give at the beginning is left out, with a line for its GPU in `notes`. Without
    the library there is an ImportError, without a driver that answers a RuntimeError.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml: Nvml = nvml or Nvml()
        self._begun: dict[int, float] = {}
        readings = self._nvml.read()
        self.names: tuple[str, ...] = ()
        notes = []
        for reading in readings:
            told = _figures(reading)
            self.names += tuple(
                f"gpu{reading.index}_{name}"
                for name, value in told.items()
                if value is not None
            )
            notes += _notes(reading, [k for k, v in told.items() if v is None])
            if reading.energy_joules is not None:
                self._begun[reading.index] = reading.energy_joules
        self.notes = tuple(notes)

    def __call__(self) -> dict[str, float | None]:
        """Returns the figures now, by name."""
        found: dict[str, float | None] = {}
        for reading in self._nvml.read():
            begun = self._begun.get(reading.index, 0.0)
            for name, value in _figures(reading).items():
                if name == "energy_joules" and value is not None:
                    value -= begun
                found[f"gpu{reading.index}_{name}"] = value
        return {name: found.get(name) for name in self.names}

    def close(self) -> None:
        """Lets NVML go."""
        self._nvml.close()


def open_gpu_reader() -> tuple[GpuReader | None, str]:
    """Returns a reader of the GPUs, or None and a line that says why.

    Without a GPU there is nothing to say.
    """
    if not visible_gpus():
        return None, ""
    try:
        return GpuReader(), ""
    except (ImportError, RuntimeError) as error:
        return None, f"No figures of the GPU: {error}"


def _figures(reading: GpuReading) -> dict[str, float | None]:
    values = {name: getattr(reading, field) for name, field in _GPU_FIGURES.items()}
    return {name: None if v is None else float(v) for name, v in values.items()}


def _notes(reading: GpuReading, missing: list[str]) -> list[str]:
    notes = []
    if reading.mig_slice is not None:
        notes.append(
            f"GPU:{reading.index} is the MIG slice {reading.mig_slice} of "
            f"{reading.name}: memory is its own; temperature, power and energy, where "
            "told, are those of the whole GPU."
        )
    if missing:
        notes.append(
            f"GPU:{reading.index} does not tell {', '.join(missing)}: its driver "
            "refuses that here, as under MIG and in some containers."
        )
    return notes
