"""Memory of this process and of the GPUs, now and at most, and who allocates it."""

import contextlib
import platform
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.machine.limits import sizes_in, text_of
from tfamp.records import checks

TENSORFLOW, GLIBC = "TensorFlow with oneDNN", "glibc"
# Libraries that stand in glibc's place, by LD_PRELOAD for example.
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")
_MAPS = Path("/proc/self/maps")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# What resets the peak. Source: man 5 proc_pid_clear_refs, value 5.
_RESET = "5"
# TensorFlow asks the C library for smaller ones.
_LARGE = 2**20


def host_allocator(maps: Path = _MAPS) -> str:
    """Returns the name of what large tensors on the CPU are allocated by.

    On CPUs where TensorFlow uses oneDNN by default (AVX512-VNNI and later) it holds
    large blocks by itself, unless TF_ONEDNN_USE_SYSTEM_ALLOCATOR or
    TF_ENABLE_ONEDNN_OPTS say otherwise; else the C library's `malloc` does.
    `TENSORFLOW`, `GLIBC`, "jemalloc", "tcmalloc" or "mimalloc"; the system's name where
    the C library is another one.
    """
    if _is_tensorflow():
        return TENSORFLOW
    loaded = text_of(maps)
    is_glibc = platform.libc_ver()[0] == "glibc"
    of_system = GLIBC if is_glibc else f"the C library of {platform.system()}"
    return next((name for name in _OTHERS if name in loaded), of_system)


def host_bytes() -> tuple[int, int]:
    """Returns what TensorFlow's own allocator holds in use, now and at its peak.

    A ValueError says that another one is in force.
    """
    found = tf.config.experimental.get_memory_info("CPU:0")
    return int(found["current"]), int(found["peak"])


def _is_tensorflow() -> bool:
    """Whether TensorFlow's own allocator counts a tensor that is made."""
    try:
        before, _ = host_bytes()
        with tf.init_scope(), tf.device("CPU:0"):
            block = tf.zeros(_LARGE, tf.uint8)
        after, _ = host_bytes()
    except (ValueError, tf.errors.OpError):
        return False
    del block
    return after - before >= _LARGE


def process_bytes(status: Path = _STATUS) -> int:
    """Returns the memory that this process holds now (resident set size).

    Where the file of Linux is not there psutil is asked; an ImportError says it is
    missing.
    """
    size = sizes_in(status).get("VmRSS")
    return int(_psutil().Process().memory_info().rss) if size is None else size


def peak_process_bytes(status: Path = _STATUS) -> int:
    """Returns the most memory that this process ever held, or since `reset_peak`.

    On Linux from the kernel's high-water mark of this process. Not from
    `resource.getrusage` there: that starts at the peak of the process which started
    this one, so a small child of a large parent reports the parent. On Windows psutil
    is asked.
    """
    peak = sizes_in(status).get("VmHWM")  # which gVisor does not tell
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return int(_psutil().Process().memory_info().peak_wset)
    # Source: getrusage(2): kilobytes on Linux and BSD, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak(clear_refs: Path = _CLEAR_REFS) -> bool:
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
    """Returns the peak of TensorFlow's allocator on the fullest GPU.

    The fullest decides what fits. It is what tensors took since the start or
    `reset_device_peak`, not what TensorFlow reserved; NVML tells that. Starts the GPUs
    if they were not yet in use. None without a GPU, and where the allocator keeps no
    count.
    """
    peaks = []
    for name in _gpus():
        # Some allocators keep no count.
        with contextlib.suppress(ValueError, tf.errors.OpError):
            peaks.append(int(tf.config.experimental.get_memory_info(name)["peak"]))
    return max(peaks, default=None)


def reset_device_peak() -> bool:
    """Lets the peak of each GPU begin anew; returns whether all of them did."""
    gpus = _gpus()
    try:
        for name in gpus:
            tf.config.experimental.reset_memory_stats(name)
    except (ValueError, tf.errors.OpError):
        return False
    return bool(gpus)


def _gpus() -> list[str]:
    """Returns the GPUs in the words of TensorFlow's memory functions."""
    gpus = tf.config.list_logical_devices("GPU")
    return [f"GPU:{index}" for index in range(len(gpus))]


def _psutil() -> Any:
    return checks.require("psutil", extra="report", purpose="Memory of this process")
