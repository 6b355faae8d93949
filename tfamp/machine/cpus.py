"""The cores that a process may use, their instructions, and whether AMX works.

Some virtual machines name the matrix instructions (AMX) among their features but hide
CPUID's leaf 0x1D, which says how tiles are laid out. oneDNN then configures no tiles,
and TensorFlow's first bfloat16 product dies of an illegal instruction. Nothing that
Linux tells shows it, so that leaf is read, by the ten bytes it takes.
"""

import ctypes
import functools
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from tfamp.machine.limits import cgroup_folders, text_of

# Stands among a CPU's features in the place of "amx_bf16" and its like.
BROKEN_AMX = "amx_broken"
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The most that oneDNN may use without AMX; it reads this before its first product.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
# push rbx; mov eax, 0x1d; xor ecx, ecx; cpuid; pop rbx; ret: the number of palettes
_READ_PALETTES = bytes.fromhex("53 b81d000000 31c9 0fa2 5b c3")


def num_usable_cpus(root: str = "/") -> int:
    """Returns the number of cores this process may use; `proc` and `sys` lie at `root`.

    A container or `taskset` often allows fewer cores than the machine has: by the
    process's affinity, or by a quota of its control groups, of which a part of a core
    counts as one.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, _quotas(Path(root)))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the cores that each control group of this process allows.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, `cpu.max`; scheduler/
    sched-bwc.rst for version 1.
    """
    found = [text_of(group / "cpu.max").split() for group in cgroup_folders(root, "")]
    for group in cgroup_folders(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        found.append([text_of(group / name).strip() for name in names])
    for parts in found:
        if len(parts) == 2 and all(p.isdecimal() and int(p) for p in parts):
            yield int(parts[0]) / int(parts[1])


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets of the processor, sorted, such as "avx512_vnni".

    `archspec.cpu.host()` drops what goes beyond the last microarchitecture whose every
    feature is here, such as AMX where a hypervisor hides a part.
    """
    import archspec.cpu

    detect = getattr(archspec.cpu, "detect", None)
    detected = getattr(detect, "detected_info", archspec.cpu.host)()
    features = detected.features or archspec.cpu.host().features
    return tuple(sorted(feature.replace("-", "_") for feature in features))


@functools.cache
def is_amx_broken() -> bool:
    """Returns whether the CPU names AMX, and yet TensorFlow's use of it would die."""
    is_told = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_told or "amx_bf16" not in text_of(Path("/proc/cpuinfo")).split():
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, prot=7) as page:
            page.write(_READ_PALETTES)
            start = ctypes.c_char.from_buffer(page)
            num_palettes = ctypes.CFUNCTYPE(ctypes.c_uint)(ctypes.addressof(start))()
            del start
            return num_palettes == 0
    except OSError:  # a system that lets no memory be run tells nothing against AMX
        return False


def avoid_broken_amx() -> None:
    """Keeps oneDNN off AMX where it is broken, unless the environment has decided.

    Has no effect on a process in which oneDNN has computed a product already.
    """
    if ISA_VARIABLE not in os.environ and is_amx_broken():
        os.environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
