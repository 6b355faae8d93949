"""Memory of this process and machine, and NVIDIA's figures of the GPUs in use."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import GpuReading, MachineMemory
from tfamp.records import checks
from tfamp.records.units import format_bytes

_PROC = Path("/proc/self")
# Less than this part of a memory, held by others or free, is worth no word.
_NOTICEABLE, _SCARCE = 0.05, 0.1
_MIG = re.compile(r"\bMIG (\S+)")


class Nvml:
    """Reads the GPUs that TensorFlow sees in this process; close it, or use `with`.

    A query that fails gives None. An ImportError says that nvidia-ml-py is not
    installed, a RuntimeError that no GPU answers. `handles` are NVML's by TensorFlow's
    number: of what it computes on, and of the whole GPU, which differ on a MIG slice.
    """

    def __init__(
        self,
        pynvml: Any = None,
        *,
        gpus: Sequence[tuple[int, str]] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        gpus = visible_gpus() if gpus is None else gpus
        self._pynvml: Any = pynvml or checks.require(
            "pynvml", extra="gpu", purpose="Figures of the GPU"
        )
        try:
            self._pynvml.nvmlInit()
        except self._pynvml.NVMLError as error:
            raise RuntimeError(
                f"NVML does not answer ({error}); expected NVIDIA's driver. Run "
                "`nvidia-smi`, and in a container start it with the GPU's driver files."
            ) from error
        shown = environ.get("CUDA_VISIBLE_DEVICES")
        self.handles: dict[int, tuple[Any, Any]] = {}
        for number, _ in gpus:
            entries = [str(number)] if shown is None else shown.split(",")[number:]
            handles = self._handles(entries[0].strip()) if entries else None
            if handles is not None:
                self.handles[number] = handles
        if not self.handles:
            self.close()
            raise RuntimeError(
                f"NVML knows none of TensorFlow's GPUs {tuple(gpus)!r}; expected "
                "NVIDIA's, as listed by `nvidia-smi -L`."
            )

    @classmethod
    def open(cls, pynvml: Any = None, **options: Any) -> "Nvml | None":
        """Returns a reader, or None where it cannot be had (no GPU, no NVML)."""
        with contextlib.suppress(ImportError, RuntimeError):
            return cls(pynvml, **options)
        return None

    def read(self) -> tuple[GpuReading, ...]:
        """Returns the figures now, a reading for each GPU; about a millisecond each."""
        return tuple(self._one(index, *both) for index, both in self.handles.items())

    def close(self) -> None:
        """Lets NVML go."""
        self.ask("nvmlShutdown")

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Returns the answer to a query of the library, None where there is none."""
        try:
            answer = getattr(self._pynvml, name)(*arguments)
        except (self._pynvml.NVMLError, AttributeError):
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def _handles(self, entry: str) -> tuple[Any, Any] | None:
        """Returns the handles behind an entry of CUDA_VISIBLE_DEVICES."""
        if not entry.isdecimal():
            part = self.ask("nvmlDeviceGetHandleByUUID", entry)
            whole = self.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", part)
            return None if part is None else (part, whole or part)
        whole = self.ask("nvmlDeviceGetHandleByIndex", int(entry))
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", whole) or 0):
            part = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", whole, index)
            if part is not None:
                return part, whole
        return None if whole is None else (whole, whole)

    def _one(self, index: int, part: Any, whole: Any) -> GpuReading:
        def of_whole(name: str, factor: float, *arguments: Any) -> float | None:
            answer = self.ask(f"nvmlDeviceGet{name}", whole, *arguments)
            return None if answer is None else answer * factor

        name = self.ask("nvmlDeviceGetName", part) or "GPU"
        named = _MIG.search(name)
        memory = self.ask("nvmlDeviceGetMemoryInfo", part)
        load = self.ask("nvmlDeviceGetUtilizationRates", part)
        return GpuReading(
            index,
            name,
            named[1] if named else None if part is whole else "MIG",
            None if load is None else load.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            of_whole("Temperature", 1.0, 0),
            of_whole("PowerUsage", 1e-3),
            of_whole("TotalEnergyConsumption", 1e-3),
        )


def visible_gpus() -> list[tuple[int, str]]:
    """Returns number and name of each GPU that TensorFlow may use here."""
    return [
        (number_of(gpu), details_of(gpu).get("device_name", ""))
        for gpu in tf.config.get_visible_devices("GPU")
    ]


def number_of(gpu: Any) -> int:
    """Returns the number of one of TensorFlow's physical devices."""
    return int(gpu.name.rsplit(":", 1)[1])


def details_of(device: Any) -> dict[str, Any]:
    """Returns TensorFlow's details of a device, {} where it has none to give."""
    with contextlib.suppress(ValueError, RuntimeError, tf.errors.OpError):
        return dict(tf.config.experimental.get_device_details(device))
    return {}


def process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the memory that this process holds now (resident set size)."""
    size = limits.sizes_in(status).get("VmRSS")
    if size is None:
        purpose = "Memory of this process"
        psutil: Any = checks.require("psutil", extra="report", purpose=purpose)
        size = int(psutil.Process().memory_info().rss)
    return size


def peak_process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the most memory that this process ever held, or since `reset_peak`."""
    peak = limits.sizes_in(status).get("VmHWM")  # which gVisor does not tell
    if peak is not None:
        return peak
    # Source: getrusage(2): kilobytes on Linux and BSD, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak(clear_refs: Path = _PROC / "clear_refs") -> bool:
    """Lets the peak begin anew from the memory held now; returns whether it could."""
    try:
        with open(clear_refs, "r+") as file:
            file.write("5")  # Source: man 5 proc_pid_clear_refs
    except OSError:
        return False
    return True


def device_peak_bytes() -> int | None:
    """Returns the peak of TensorFlow's allocator on the fullest GPU; None without."""
    peaks = []
    for name in _logical_gpus():
        with contextlib.suppress(ValueError, tf.errors.OpError):
            peaks.append(int(tf.config.experimental.get_memory_info(name)["peak"]))
    return max(peaks, default=None)


def reset_device_peak() -> bool:
    """Lets the peak of each GPU begin anew; returns whether all of them did."""
    gpus = _logical_gpus()
    try:
        for name in gpus:
            tf.config.experimental.reset_memory_stats(name)
    except (ValueError, tf.errors.OpError):
        return False
    return bool(gpus)


def _logical_gpus() -> list[str]:
    """Returns the GPUs in the words of TensorFlow's memory functions."""
    return [f"GPU:{i}" for i, _ in enumerate(tf.config.list_logical_devices("GPU"))]


def machine_memory(
    pynvml: Any = None, *, root: Path = Path("/"), **options: Any
) -> MachineMemory:
    """Returns the memory of this machine and its GPUs; starts no GPU."""
    nvml = Nvml.open(pynvml, **options)
    with nvml or contextlib.nullcontext():
        gpus = () if nvml is None else nvml.read()
    return MachineMemory(limits.memory_limits(root), gpus)


def advice(memory: MachineMemory) -> tuple[tuple[str, str], ...]:
    """Returns what could be better about memory, and what to do, in pairs."""
    found = [
        (
            f"Other processes hold {format_bytes(gpu.memory_used_bytes or 0)} of "
            f"{format_bytes(gpu.memory_total_bytes or 0)} on GPU:{gpu.index}.",
            "End them (`nvidia-smi` lists them), choose another GPU by "
            "CUDA_VISIBLE_DEVICES, or set TF_FORCE_GPU_ALLOW_GROWTH=true for all.",
        )
        for gpu in memory.gpus
        if (gpu.memory_used_bytes or 0) >= _NOTICEABLE * (gpu.memory_total_bytes or 1)
    ]
    found += [
        (
            f"{format_bytes(limit.free_bytes)} of {format_bytes(limit.bytes)} "
            f"({limit.source}) is free.",
            "End other processes, or raise the container's limit.",
        )
        for limit in memory.limits
        if limit.used_bytes is not None and limit.free_bytes < _SCARCE * limit.bytes
    ]
    return tuple(found)
