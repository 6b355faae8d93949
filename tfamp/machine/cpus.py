"""The cores that a process may use, their instructions, and whether AMX works.

Some virtual machines name the matrix instructions (AMX) among their features but hide
CPUID's leaf 0x1D, which says how tiles are laid out. oneDNN then configures no tiles,
and TensorFlow's first bfloat16 product dies of an illegal instruction. A child process
finds out.
"""

import functools
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

from tfamp.machine.limits import cgroup_folders, text_of

# Stands among a CPU's features in the place of "amx_bf16" and its like.
BROKEN_AMX = "amx_broken"
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The most that oneDNN may use without AMX; it reads this before its first product.
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"

_TIMEOUT_SECONDS = 20
# As oneDNN does: ask CPUID for the tile palette, configure tiles by it, multiply.
_MACHINE_CODE = """
    53 b81d000000 31c9 0fa2  # push rbx; mov eax, 0x1d; xor ecx, ecx; cpuid
    85c0 0f95c0 8807 5b      # test eax, eax; setnz al; mov [rdi], al; pop rbx
    c4e2784907               # ldtilecfg [rdi]
    c4e27b49c0 c4e27b49c8    # tilezero tmm0; tilezero tmm1
    c4e27b49d0 c4e26a5cc1    # tilezero tmm2; tdpbf16ps tmm0, tmm1, tmm2
    c4e27849c0 c3            # tilerelease; ret
"""
_CHILD = """
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
if libc.syscall(158, 0x1023, 18):  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    sys.exit()  # the kernel gives no tiles, so oneDNN leaves them alone
tiles = (ctypes.c_ubyte * 64)()
for tile in range(3):
    tiles[16 + 2 * tile], tiles[48 + tile] = 64, 16  # bytes in a row, rows
page = mmap.mmap(-1, mmap.PAGESIZE, prot=7)
page.write(bytes.fromhex(sys.argv[1]))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(tiles))
"""


def num_usable_cpus(root: str = "/") -> int:
    """Returns the number of cores this process may use; `proc` and `sys` lie at `root`.

    A container or `taskset` often allows fewer cores than the machine has: by the
    process's affinity, or by a quota of its control groups, of which a part of a core
    counts as one. More threads than that are stopped for most of each 0.1 s.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, `cpu.max`; scheduler/
    sched-bwc.rst for version 1.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, _quotas(Path(root)))]))


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets of the processor, sorted, such as "avx512_vnni".

    `archspec.cpu.host()` names the last microarchitecture whose every feature is here
    and drops what goes beyond it, such as AMX, where a hypervisor hides a part.
    """
    import archspec.cpu

    detect = getattr(archspec.cpu, "detect", None)
    detected = getattr(detect, "detected_info", archspec.cpu.host)()
    features = detected.features or archspec.cpu.host().features
    return tuple(sorted(feature.replace("-", "_") for feature in features))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the cores that each control group of this process allows."""
    for group in cgroup_folders(root, ""):
        yield from _quota(text_of(group / "cpu.max").split())
    for group in cgroup_folders(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        yield from _quota([text_of(group / name).strip() for name in names])


def _quota(parts: list[str]) -> Iterator[float]:
    """Yields the cores of a quota and its period, nothing where there is no limit."""
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        quota, period = map(int, parts)
        if quota and period:
            yield quota / period


def _run(command: list[str]) -> int:
    """Returns the exit status of a command, below 0 if a signal ended it."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    ).returncode


def _cpuinfo() -> str:
    """Returns what Linux on x86-64 tells of the CPU, "" elsewhere."""
    is_told = sys.platform == "linux" and platform.machine() == "x86_64"
    return text_of(Path("/proc/cpuinfo")) if is_told else ""


def probe_amx(
    cpuinfo: Callable[[], str] = _cpuinfo, run: Callable[[list[str]], int] = _run
) -> bool:
    """Returns whether AMX is named by the CPU and yet ends a process that uses it.

    `run` gives a command's exit status, below 0 for a signal.
    """
    if "amx_bf16" not in cpuinfo().split():
        return False
    lines = [line.partition("#")[0] for line in _MACHINE_CODE.splitlines()]
    code = "".join("".join(lines).split())
    try:
        # A child that cannot start or says no tells nothing against AMX.
        return run([sys.executable, "-I", "-S", "-c", _CHILD, code]) < 0
    except (OSError, subprocess.SubprocessError):
        return False


@functools.cache
def is_amx_broken() -> bool:
    """Returns what `probe_amx` finds here; takes 30 ms, once, where AMX is named."""
    return probe_amx()


def avoid_broken_amx(
    environ: MutableMapping[str, str] = os.environ,
    is_broken: Callable[[], bool] = is_amx_broken,
) -> None:
    """Keeps oneDNN off AMX where it is broken, unless the environment has decided.

    Has no effect on a process in which oneDNN has computed a product already.
    """
    if ISA_VARIABLE not in environ and is_broken():
        environ[ISA_VARIABLE] = ISA_WITHOUT_AMX
