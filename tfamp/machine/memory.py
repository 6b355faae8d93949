"""Memory of this process, this machine and its GPUs, and what to change about it.

`machine_memory` looks; `advice` decides by plain rules over what it found, so that any
machine can be described and asked about.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import GpuMemory, Holder, MachineMemory, MemoryLimit
from tfamp.machine.nvml import Nvml, number_of
from tfamp.records import checks
from tfamp.records.units import format_bytes

_PROC = Path("/proc/self")
# What resets the peak. Source: man 5 proc_pid_clear_refs, value 5.
_RESET = "5"
_ALLOCATOR, _GROWTH = "TF_GPU_ALLOCATOR", "TF_FORCE_GPU_ALLOW_GROWTH"
_PINNED, _PER_DEVICE = "TF_GPU_HOST_MEM_LIMIT_IN_MB", "TF_PER_DEVICE_MEMORY_LIMIT_MB"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
# The last is the one for training; the others find errors of TensorFlow's.
# Source: TensorFlow, tensorflow/core/common_runtime/gpu, 2026-11-22.
ALLOCATORS = ("cuda_malloc", "memory_guard", "cuda_malloc_async")
# TensorFlow asks the C library for smaller blocks.
_MIB = 2**20
# Less than this part of a memory, held by others or free, is worth no word.
_NOTICEABLE, _SCARCE = 0.05, 0.1


def process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the memory that this process holds now (resident set size).

    Where the file of Linux is not there psutil is asked; an ImportError says it is
    missing.
    """
    size = limits.sizes_in(status).get("VmRSS")
    return int(_psutil().Process().memory_info().rss) if size is None else size


def peak_process_bytes(status: Path = _PROC / "status") -> int:
    """Returns the most memory that this process ever held, or since `reset_peak`.

    On Linux from the kernel's high-water mark of this process. Not from
    `resource.getrusage` there: that starts at the peak of the process which started
    this one, so a small child of a large parent reports the parent. On Windows psutil
    is asked.
    """
    peak = limits.sizes_in(status).get("VmHWM")  # which gVisor does not tell
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return int(_psutil().Process().memory_info().peak_wset)
    # Source: getrusage(2): kilobytes on Linux and BSD, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak(clear_refs: Path = _PROC / "clear_refs") -> bool:
    """Lets the peak begin anew from the memory held now; Linux only.

    Returns whether it worked. Where it did not, the peak stays that of the whole
    process: measure in a fresh one.
    """
    if not clear_refs.exists():
        return False
    try:
        clear_refs.write_text(_RESET)
    except OSError:
        return False
    return True


def device_peak_bytes() -> int | None:
    """Returns the peak of TensorFlow's allocator on the fullest GPU, which decides.

    It is what tensors took since the start or `reset_device_peak`, not what TensorFlow
    reserved; NVML tells that. Starts the GPUs if they were not yet in use. None without
    a GPU, and where the allocator keeps no count.
    """
    peaks = []
    for name in _logical_gpus():
        # Some allocators keep no count.
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
    pynvml: Any = None,
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    **options: Any,
) -> MachineMemory:
    """Returns the memory of this machine and who holds it; starts no GPU.

    `proc` and `sys` lie below `root`; `options` are further ones of `Nvml`. An
    ImportError says that the system does not tell its memory (Windows) and psutil is
    not installed.
    """
    swap = limits.swap_bytes(root) or (None, None)
    nvml = Nvml.open(pynvml, environ=environ, **options)
    gpus: tuple[GpuMemory, ...] = ()
    if nvml is not None:
        with nvml:
            gpus = tuple(_gpus(nvml, root))
    return MachineMemory(limits.memory_limits(root), gpus, *swap)


def advice(
    memory: MachineMemory,
    environ: Mapping[str, str] = os.environ,
    *,
    has_gpu: bool | None = None,
) -> tuple[Advice, ...]:
    """Returns what could be better about memory and allocators, with remedies.

    `has_gpu` says whether TensorFlow uses a GPU, so that its settings matter; None
    where `memory` tells.

    Example:
        >>> held = Holder(123, "python", 14 * 2**30)
        >>> gpu = GpuMemory(0, "T4", 15 * 2**30, 14 * 2**30, holders=(held,))
        >>> print(advice(MachineMemory(gpus=(gpu,)), {})[0].message)
        Another process (pid 123, python) holds 14.0 GiB of 15.0 GiB on GPU:0.
    """
    found = [each for gpu in memory.gpus for each in _of_gpu(gpu)]
    if bool(memory.gpus) if has_gpu is None else has_gpu:
        found += _of_variables(environ)
    for limit in memory.limits:
        found += _of_limit(limit, memory.limits[0])
    return tuple(found)


def _gpus(nvml: Nvml, root: Path) -> Iterator[GpuMemory]:
    physical = {number_of(gpu): gpu for gpu in tf.config.list_physical_devices("GPU")}
    for reading in nvml.read():
        part, _ = nvml.handles[reading.index]
        gpu = physical.get(reading.index)
        growth, limit = (None, None) if gpu is None else _taking(gpu)
        yield GpuMemory(
            reading.index,
            reading.name,
            reading.memory_total_bytes,
            reading.memory_used_bytes,
            reading.mig_slice,
            _holders(nvml, part, root),
            growth,
            limit,
        )


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


def _taking(gpu: Any) -> tuple[bool | None, int | None]:
    """Returns whether this process takes memory as needed, and how much at most."""
    growth = limit = None
    with contextlib.suppress(ValueError, RuntimeError):
        growth = tf.config.experimental.get_memory_growth(gpu)
    with contextlib.suppress(ValueError, RuntimeError):
        logical = tf.config.get_logical_device_configuration(gpu) or ()
        each = [device.memory_limit for device in logical]
        if each and None not in each:
            limit = _MIB * int(sum(each))
    return growth, limit


def _of_gpu(gpu: GpuMemory) -> Iterator[Advice]:
    where, total = f"GPU:{gpu.index}", gpu.total_bytes
    if total is None:
        return
    for holder in gpu.others:
        if (holder.bytes or 0) >= _NOTICEABLE * total:
            yield Advice(
                gpu.held_by(holder),
                "End it, or choose another GPU by CUDA_VISIBLE_DEVICES; where both are "
                f"to share it, set {_GROWTH}=true for both.",
            )
    # What the driver itself takes is some hundred MiB on large GPUs.
    if gpu.unseen_bytes >= _SCARCE * total:
        yield Advice(
            f"{format_bytes(gpu.unseen_bytes)} of {format_bytes(total)} on {where} are "
            "held by processes that cannot be seen from here, such as those of another "
            "container.",
            "Look with `nvidia-smi` on the host, or choose another GPU by "
            "CUDA_VISIBLE_DEVICES.",
        )
    if gpu.limit_bytes is not None and gpu.limit_bytes > total:
        yield Advice(
            f"This process may take {format_bytes(gpu.limit_bytes)} on {where}, which "
            f"has {format_bytes(total)}.",
            "Lower the `memory_limit` of its logical devices.",
        )


def _of_variables(environ: Mapping[str, str]) -> Iterator[Advice]:
    def advice(name: str, why: str, remedy: str) -> Advice:
        return Advice(f"{name} is {environ[name]!r}{why}", remedy)

    allocator, growth = environ.get(_ALLOCATOR), environ.get(_GROWTH)
    if allocator and allocator != ALLOCATORS[-1]:
        why = ", which is slow and meant for finding errors in TensorFlow."
        if allocator not in ALLOCATORS:
            why = ", which TensorFlow does not know and ignores."
        remedy = f"Set {_ALLOCATOR}={ALLOCATORS[-1]}, or unset it."
        yield advice(_ALLOCATOR, why, remedy)
    if growth and growth not in ("true", "false"):
        why = ", which TensorFlow ignores: it takes only 'true' and 'false'."
        yield advice(_GROWTH, why, f"Set {_GROWTH}=true.")
    if environ.get(_PREALLOCATE) and not growth:
        why = ", which JAX reads and TensorFlow does not."
        remedy = f"Set {_GROWTH}=true to have TensorFlow take GPU memory as needed."
        yield advice(_PREALLOCATE, why, remedy)
    for name in (_PINNED, _PER_DEVICE):
        value = environ.get(name, "")
        if value and not value.strip().isdecimal():
            remedy = f"Set another number, as in {name}=8192, or unset it."
            yield advice(name, "; expected a whole number of MiB.", remedy)


def _of_limit(limit: MemoryLimit, machine: MemoryLimit) -> Iterator[Advice]:
    if limit.source == limits.ADDRESS_SPACE and limit.bytes < machine.bytes:
        yield Advice(
            f"RLIMIT_AS lets this process reserve {format_bytes(limit.bytes)} of "
            "addresses. TensorFlow reserves many more than it uses, and ends with "
            "`std::bad_alloc` at the limit.",
            "Run `ulimit -v unlimited`, and bound the memory by a cgroup.",
        )
    elif limit.used_bytes is not None and limit.free_bytes < _SCARCE * limit.bytes:
        yield Advice(
            f"{format_bytes(limit.free_bytes)} of {format_bytes(limit.bytes)} "
            f"({limit.source}) is free.",
            "End other processes, or raise the container's limit.",
        )
