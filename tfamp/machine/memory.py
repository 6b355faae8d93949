"""Memory of this process, this machine and its GPUs, and what to change about it.

`machine_memory` looks; `advice` decides by plain rules over what it found, so that any
machine can be described and asked about.
"""

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import MachineMemory
from tfamp.machine.nvml import Nvml
from tfamp.records import checks
from tfamp.records.units import format_bytes

_PROC = Path("/proc/self")
# Less than this part of a memory, held by others or free, is worth no word.
_NOTICEABLE, _SCARCE = 0.05, 0.1


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


class Advice(NamedTuple):
    """Something about memory that could be better, and what to do."""

    message: str
    remedy: str


def advice(memory: MachineMemory) -> tuple[Advice, ...]:
    """Returns what could be better about memory, ahead of any work of this process."""
    found = [
        Advice(
            f"Other processes hold {format_bytes(gpu.memory_used_bytes or 0)} of "
            f"{format_bytes(gpu.memory_total_bytes or 0)} on GPU:{gpu.index}.",
            "End them (`nvidia-smi` lists them), or choose another GPU by "
            "CUDA_VISIBLE_DEVICES; where all are to share it, set "
            "TF_FORCE_GPU_ALLOW_GROWTH=true for each.",
        )
        for gpu in memory.gpus
        if (gpu.memory_used_bytes or 0) >= _NOTICEABLE * (gpu.memory_total_bytes or 1)
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
