"""How many cores a process may use, and which instructions they know."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Where Linux mounts its control groups, version 2 and the controllers of version 1.
_GROUPS = "sys/fs/cgroup"


def num_usable_cpus(root: str = "/") -> int:
    """Returns the number of cores this process may use.

    A container or `taskset` often allows fewer cores than the machine has: by the
    process's affinity, or by a quota of its control groups, of which a part of a core
    counts as one. More threads than that are stopped for most of each 0.1 s.

    Args:
        root: Folder in which "proc" and "sys" lie.

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
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _groups(root / _GROUPS, path):
                yield from _quota(_read(group / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for group in _groups(root / _GROUPS / controllers, path):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                yield from _quota([_read(group / name).strip() for name in names])


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """Yields the folders of a group and of those above it.

    A container sees its own group as the mount itself; the others do not exist there.
    """
    group = PurePosixPath(path.lstrip("/"))
    yield from (mount / one for one in (group, *group.parents))


def _quota(parts: list[str]) -> Iterator[float]:
    """Yields the cores of a quota and its period, nothing where there is no limit."""
    if len(parts) == 2 and all(part.isdecimal() for part in parts):
        quota, period = map(int, parts)
        if quota and period:
            yield quota / period


def _read(path: Path) -> str:
    """Returns what a file says, nothing where there is none."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
