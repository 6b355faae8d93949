"""How much memory this process may take on the CPU: the smallest of all limits."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class MemoryLimit(Record):
    """The most memory there is to take, who says so, and what counts against it now."""

    bytes: int
    source: str
    used_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """What is left now; all of it where the use is not known."""
        return max(0, self.bytes - (self.used_bytes or 0))


@dataclasses.dataclass(frozen=True)
class GpuReading(Record):
    """Figures of a GPU at one moment; None where the driver does not tell.

    On a MIG slice memory is its own, and the rest the whole GPU's. `utilisation`, in
    [0, 1], says how long a kernel ran; `energy_joules` counts from some moment.
    """

    index: int
    name: str
    mig_slice: str | None = None  # such as "1g.5gb"
    utilisation: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None

    @property
    def memory_free_bytes(self) -> int | None:
        """What no process holds; None where it is not told."""
        if self.memory_total_bytes is None or self.memory_used_bytes is None:
            return None
        return max(0, self.memory_total_bytes - self.memory_used_bytes)


@dataclasses.dataclass(frozen=True)
class MachineMemory(Record):
    """Memory of this machine: limits on the CPU's, and GPUs that TensorFlow uses."""

    limits: tuple[MemoryLimit, ...] = ()
    gpus: tuple[GpuReading, ...] = ()

    @property
    def limit(self) -> MemoryLimit | None:
        """The smallest limit, which this process meets first; None if none is known."""
        return min(self.limits, key=lambda limit: limit.bytes, default=None)


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns every limit on the memory of this process, the machine's memory first."""
    fields = sizes_in(root / "proc/meminfo")
    total, free = fields.get("MemTotal"), fields.get("MemAvailable")
    used = None if total is None or free is None else total - free
    whole = system_bytes() if total is None else total
    found = [MemoryLimit(whole, "physical memory", used)]
    groups = []
    for folder in cgroup_folders(root):
        names = ("memory.max", "memory.current")
        limit, now = (text_of(folder / name).strip() for name in names)
        if limit.isdecimal():
            # The kernel gives cached files up before it kills.
            cached = _numbers(folder / "memory.stat").get("inactive_file", 0)
            held = max(0, int(now) - cached) if now.isdecimal() else None
            groups.append(MemoryLimit(int(limit), "cgroup v2", held))
    found += sorted(groups, key=lambda each: each.bytes)[:1]
    return tuple(found)


def cgroup_folders(root: Path) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those above it."""
    mount = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):  # version 2, as in "0::/user/job"
            parts = (part for part in line[3:].split("/") if part.strip("."))
            group = PurePosixPath(*parts)
            yield from (mount / one for one in (group, *group.parents))
    yield mount


def sizes_in(path: Path) -> dict[str, int]:
    """Returns the sizes of a file of `proc`, in bytes: "MemTotal:  24684092 kB"."""
    return {name.rstrip(":"): 1024 * size for name, size in _numbers(path).items()}


def _numbers(path: Path) -> dict[str, int]:
    words = [line.split() for line in text_of(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


def text_of(path: Path) -> str:
    """Returns what a file says, nothing where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def system_bytes() -> int:
    """Returns the machine's memory, where there is no `proc` too, as on macOS."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
