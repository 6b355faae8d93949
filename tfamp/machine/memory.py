"""Memory of this process, this machine and its GPUs, and what to change about it.

`machine_memory` looks; `advice` decides by plain rules over what it found, so that any
machine can be described and asked about.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import GpuMemory, Holder, MachineMemory
from tfamp.machine.nvml import Nvml
from tfamp.records import checks
from tfamp.records.units import format_bytes

_PROC = Path("/proc/self")
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
# Less than this part of a memory, held by others or free, is worth no word.
_NOTICEABLE, _SCARCE = 0.05, 0.1


def process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the memory that this process holds now (resident set size)."""
    size = limits.sizes_in(status).get("VmRSS")
    return int(_psutil().Process().memory_info().rss) if size is None else size


def peak_process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the most memory that this process ever held, or since `reset_peak`."""
    peak = limits.sizes_in(status).get("VmHWM")  # which gVisor does not tell
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return int(_psutil().Process().memory_info().peak_wset)
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
    gpus = tf.config.list_logical_devices("GPU")
    return [f"GPU:{index}" for index in range(len(gpus))]


def _psutil() -> Any:
    return checks.require("psutil", extra="report", purpose="Memory of this process")


class Advice(NamedTuple):
    """Something about memory that could be better, and what to do."""

    message: str
    remedy: str


def machine_memory(
    pynvml: Any = None, *, root: Path = Path("/"), **options: Any
) -> MachineMemory:
    """Returns the memory of this machine and who holds it; starts no GPU."""
    nvml = Nvml.open(pynvml, **options)
    gpus: tuple[GpuMemory, ...] = ()
    if nvml is not None:
        with nvml:
            gpus = tuple(
                GpuMemory(
                    *(each.index, each.name),
                    *(each.memory_total_bytes, each.memory_used_bytes),
                    each.mig_slice,
                    _holders(nvml, nvml.handles[each.index][0], root),
                )
                for each in nvml.read()
            )
    return MachineMemory(limits.memory_limits(root), gpus)


def _holders(nvml: Nvml, part: Any, root: Path) -> tuple[Holder, ...]:
    """Returns the processes on a GPU or slice, the largest first."""
    found: dict[int, Holder] = {}
    # A process that draws and computes is in both lists, with the same figure.
    for query in ("Compute", "Graphics"):
        for each in nvml.ask(f"nvmlDeviceGet{query}RunningProcesses", part) or ():
            held = None if each.usedGpuMemory is None else int(each.usedGpuMemory)
            name = nvml.ask("nvmlSystemGetProcessName", each.pid)
            name = name or limits.text_of(root / f"proc/{each.pid}/comm")
            # A path, with the arguments on some systems.
            name = name.strip().split(" ")[0].rsplit("/", 1)[-1]
            found[each.pid] = Holder(each.pid, name, held, each.pid == os.getpid())
    return tuple(sorted(found.values(), key=lambda each: -(each.bytes or 0)))


def advice(memory: MachineMemory) -> tuple[Advice, ...]:
    """Returns what could be better about memory, with remedies.

    Example:
        >>> held = Holder(123, "python", 14 * 2**30)
        >>> gpu = GpuMemory(0, "T4", 15 * 2**30, 14 * 2**30, holders=(held,))
        >>> print(advice(MachineMemory(gpus=(gpu,)))[0].message)
        Another process (pid 123, python) holds 14.0 GiB of 15.0 GiB on GPU:0.
    """
    found = [
        Advice(
            gpu.held_by(holder),
            "End it, or choose another GPU by CUDA_VISIBLE_DEVICES; where both are to "
            f"share it, set {_GROWTH}=true for both.",
        )
        for gpu in memory.gpus
        for holder in gpu.others
        if (holder.bytes or 0) >= _NOTICEABLE * (gpu.total_bytes or 1)
    ]
    found += [
        Advice(
            f"{format_bytes(limit.free_bytes)} of {format_bytes(limit.bytes)} "
            f"({limit.source}) is free.",
            "End other processes, or raise the container's limit.",
        )
        for limit in memory.limits
        if limit.used_bytes is not None and limit.free_bytes < _SCARCE * limit.bytes
    ]
    return tuple(found)
