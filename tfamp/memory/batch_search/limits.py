"""How much memory a trial may take here, and what says so."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tfamp.machine import limits
from tfamp.machine.limits import MemoryLimit
from tfamp.machine.nvml import Nvml
from tfamp.records import checks

GPU, CALLER = "GPU memory", "max_memory_bytes"
_ROOT = Path("/")


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
    is in use, and `ulimit -v`.

    Args:
        max_memory_bytes: The caller's own limit.
        has_gpu: Whether the model trains on a GPU; None looks.
        gpu: Gives the limit of the fullest GPU, or None; None asks NVML.
        root: Where `proc` and `sys` lie.
        address_space: Gives the limit on addresses; None asks the system.

    Returns:
        None where nothing is known, as on a GPU without NVML.

    Raises:
        TypeError: The caller's limit is no whole number.
        ValueError: It is below 1.

    Example:
        >>> memory_limit(10**6, has_gpu=False)
        MemoryLimit(bytes=1000000, source='max_memory_bytes', used_bytes=None)
        >>> memory_limit(has_gpu=True, gpu=lambda: None) is None
        True
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
    """Returns what a trial may take: what is free of a limit, less a margin.

    Example:
        >>> allowed_bytes(MemoryLimit(1000, "cgroup v2", used_bytes=200), 0.25)
        600
    """
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
