"""How much memory this process may take on the CPU, and what sets that limit.

A container sees the machine's whole memory and is killed at its cgroup's limit, so the
smallest of all limits decides.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.records.units import format_bytes

PHYSICAL = "physical memory"


@dataclasses.dataclass(frozen=True)
class MemoryLimit(Record):
    """The most memory there is to take, who says so, and what counts against it now.

    `source` is "physical memory" or "cgroup v2" (a container's limit). `used_bytes` is
    of all processes that share it, without cached files, which the system gives up.
    """

    bytes: int
    source: str
    used_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """What is left now; all of it where the use is not known."""
        return max(0, self.bytes - (self.used_bytes or 0))


@dataclasses.dataclass(frozen=True)
class Holder(Record):
    """A process that holds memory on a GPU; `pid` is the host's, in a container too."""

    pid: int
    name: str = ""
    bytes: int | None = None
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class GpuMemory(Record):
    """Memory of a GPU that TensorFlow uses, or of its MIG slice, and who holds it.

    `index` is TensorFlow's, as in "GPU:0". `holders` come with the largest first; those
    of other containers may be missing.
    """

    index: int
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    mig_slice: str | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """What no process holds; None where it is not told."""
        if self.total_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def others(self) -> tuple[Holder, ...]:
        """The holders other than the process that asks."""
        return tuple(holder for holder in self.holders if not holder.is_own)

    def held_by(self, holder: Holder) -> str:
        """Says what another process holds here."""
        name = f", {holder.name}" if holder.name else ""
        part, whole = holder.bytes or 0, self.total_bytes or 0
        return (
            f"Another process (pid {holder.pid}{name}) holds {format_bytes(part)} of "
            f"{format_bytes(whole)} on GPU:{self.index}."
        )


@dataclasses.dataclass(frozen=True)
class MachineMemory(Record):
    """Memory of this machine, as this process may take it.

    `limits` are all on the CPU's memory, the machine's own first; `gpus` are those that
    TensorFlow uses, none without NVML.
    """

    limits: tuple[MemoryLimit, ...] = ()
    gpus: tuple[GpuMemory, ...] = ()

    @property
    def limit(self) -> MemoryLimit | None:
        """The smallest limit, which this process meets first; None if none is known."""
        return min(self.limits, key=lambda limit: limit.bytes, default=None)


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns every limit on the memory of this process, the machine's memory first."""
    fields = sizes_in(root / "proc/meminfo")
    total, free = fields.get("MemTotal"), fields.get("MemAvailable")
    used = None if total is None or free is None else total - free
    found = [MemoryLimit(system_bytes() if total is None else total, PHYSICAL, used)]
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
    sizes = _numbers(path)
    return {name.rstrip(":"): 1024 * size for name, size in sizes.items()}


def _numbers(path: Path) -> dict[str, int]:
    """Returns first word -> number of a file's lines, {} where it cannot be read."""
    words = [line.split() for line in text_of(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdecimal()}


def text_of(path: Path) -> str:
    """Returns what a file says, nothing where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def system_bytes() -> int:
    """Returns the machine's memory where there is no `proc` (macOS, Windows)."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        psutil = checks.require(
            "psutil", extra="report", purpose="The size of this machine's memory"
        )
        return int(psutil.virtual_memory().total)
