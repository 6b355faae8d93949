"""The cores that a process may use, their instructions, and whether AMX works.

Some virtual machines name the matrix instructions (AMX) but hide CPUID's leaf 0x1D,
which says how tiles are laid out, and TensorFlow's first bfloat16 product dies of an
illegal instruction. Nothing else shows it.
"""

import functools
import math
import os
import platform
from pathlib import Path

from tfamp.machine.limits import cgroup_folders, text_of

# Stands among a CPU's features in the place of "amx_bf16" and its like.
BROKEN_AMX = "amx_broken"
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The most that oneDNN may use without AMX; it reads this before its first product.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"


def num_usable_cpus(root: str = "/") -> int:
    """Returns the number of cores this process may use, of files below `root`."""
    if hasattr(os, "sched_getaffinity"):
        counts = [len(os.sched_getaffinity(0))]
    else:
        counts = [os.cpu_count() or 1]
    for group in cgroup_folders(Path(root)):
        parts = text_of(group / "cpu.max").split()
        if len(parts) == 2 and all(p.isdecimal() and int(p) for p in parts):
            counts.append(math.ceil(int(parts[0]) / int(parts[1])))
    return max(1, min(counts))


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets of the processor, sorted, such as "avx512_vnni"."""
    import archspec.cpu

    detect = getattr(archspec.cpu, "detect", None)
    detected = getattr(detect, "detected_info", archspec.cpu.host)()
    features = detected.features or archspec.cpu.host().features
    return tuple(sorted(feature.replace("-", "_") for feature in features))


@functools.cache
def is_amx_broken() -> bool:
    """Returns whether the CPU names AMX, and yet TensorFlow's use of it would die."""
    if "amx_bf16" not in text_of(Path("/proc/cpuinfo")).split():
        return False
    return platform.machine() == "x86_64" and _cpuid(0x1D) == 0


def _cpuid(leaf: int) -> int | None:
    """Returns the first register of a leaf, None where no code may be made to ask."""
    from archspec.vendor.cpuid.cpuid import CPUID

    try:
        return int(CPUID()(leaf, 0)[0])
    except OSError:
        return None


def avoid_broken_amx() -> None:
    """Keeps oneDNN off AMX where it is broken, unless the environment has decided."""
    if ISA_VARIABLE not in os.environ and is_amx_broken():
        os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
