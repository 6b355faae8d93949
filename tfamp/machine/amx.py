"""Whether the CPU's matrix instructions (AMX) can be used, or end the process.

Some virtual machines name AMX among their features but hide CPUID's leaf 0x1D, which
says how tiles are laid out. oneDNN then configures no tiles, and TensorFlow's first
bfloat16 product dies of an illegal instruction. A child process finds out.
"""

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

# Stands among a CPU's features in the place of "amx_bf16" and its like.
BROKEN = "amx_broken"
CAP_VARIABLE = "ONEDNN_MAX_CPU_ISA"
# The most that oneDNN may use without AMX; it reads this before its first product.
CAP = "AVX512_CORE_FP16"

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
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def probe(
    cpuinfo: Callable[[], str] = _cpuinfo, run: Callable[[list[str]], int] = _run
) -> bool:
    """Returns whether AMX is named by the CPU and yet ends a process that uses it.

    `run` gives a command's exit status, below 0 for a signal.

    Example:
        >>> probe(lambda: "flags : amx_tile amx_bf16", lambda command: -4)
        True
        >>> probe(lambda: "flags : avx2", lambda command: -4)
        False
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
def is_broken() -> bool:
    """Returns what `probe` finds here; takes 30 ms, once, where AMX is named."""
    return probe()


def avoid(
    environ: MutableMapping[str, str] = os.environ,
    is_broken: Callable[[], bool] = is_broken,
) -> None:
    """Keeps oneDNN off AMX where it is broken, unless the environment has decided.

    Has no effect on a process in which oneDNN has computed a product already.
    """
    if CAP_VARIABLE not in environ and is_broken():
        environ[CAP_VARIABLE] = CAP
