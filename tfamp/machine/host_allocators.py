"""Which allocator a process's tensors on the CPU come from."""

import platform
from pathlib import Path

import tensorflow as tf

TENSORFLOW, GLIBC = "TensorFlow with oneDNN", "glibc"
# Libraries that stand in glibc's place, by LD_PRELOAD for example.
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")
_MAPS = Path("/proc/self/maps")
# TensorFlow asks the C library for smaller ones.
_LARGE = 2**20


def host_allocator(maps: Path = _MAPS) -> str:
    """Returns the name of what large tensors on the CPU are allocated by.

    On CPUs where TensorFlow uses oneDNN by default (AVX512-VNNI and later) it holds
    large blocks by itself, unless TF_ONEDNN_USE_SYSTEM_ALLOCATOR or
    TF_ENABLE_ONEDNN_OPTS say otherwise; else the C library's `malloc` does.

    Args:
        maps: The file that lists the libraries in the process.

    Returns:
        `TENSORFLOW`, `GLIBC`, "jemalloc", "tcmalloc" or "mimalloc"; the system's name
        where the C library is another one.

    Example:
        >>> host_allocator() != ""
        True
    """
    if _is_tensorflow():
        return TENSORFLOW
    for name in _OTHERS:
        if _is_loaded(name, maps):
            return name
    if platform.libc_ver()[0] == "glibc":
        return GLIBC
    return f"the C library of {platform.system()}"


def host_bytes() -> tuple[int, int]:
    """Returns what TensorFlow's own allocator holds in use, now and at its peak.

    Raises:
        ValueError: Another one is in force.
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


def _is_loaded(name: str, maps: Path) -> bool:
    try:
        return name in maps.read_text()
    except OSError:
        return False
