"""Records of memory: limits on this process, GPUs, and who holds memory on them.

Apart from the code that reads them, so that they are there without TensorFlow.
"""

import dataclasses

from tfamp.records.record import Record


@dataclasses.dataclass(frozen=True)
class MemoryLimit(Record):
    """The most memory there is to take, and who says so.

    Args:
        bytes: The limit.
        source: "physical memory", "cgroup v2" or "cgroup v1" (a container's limit), or
            "RLIMIT_AS" (`ulimit -v`, which counts reserved addresses and not memory).
        used_bytes: What counts against it now, of all processes that share it; cached
            files, which the system gives up on demand, are left out. None if unknown.
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
    """A process that holds memory on a GPU.

    Args:
        pid: Its number, in a container as the host counts.
        name: Its program, "" where it is not told.
        bytes: What it holds, None where it is not told.
        is_own: Whether it is the process that asks.
    """

    pid: int
    name: str = ""
    bytes: int | None = None
    is_own: bool = False


@dataclasses.dataclass(frozen=True)
class GpuMemory(Record):
    """Memory of a GPU that TensorFlow uses, or of the slice of one.

    Args:
        index: Its number in TensorFlow, as in "GPU:0".
        name: The maker's name.
        total_bytes: Its size, of a slice the slice's own; None where it is not told.
        used_bytes: Held by all processes.
        is_mig: Whether the GPU is cut into slices (MIG); None where it is not told.
        mig_slice: Name of the slice, such as "1g.5gb"; None for a whole GPU.
        holders: The processes that hold memory there, the largest first. Those of
            other containers may be missing.
        growth: Whether this process takes memory as it needs it, and not all at once;
            None where it is not decided yet.
        limit_bytes: What this process may take, all its logical devices together; None
            without a limit.
    """

    index: int
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    is_mig: bool | None = None
    mig_slice: str | None = None
    holders: tuple[Holder, ...] = ()
    growth: bool | None = None
    limit_bytes: int | None = None

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

    @property
    def unseen_bytes(self) -> int:
        """What is in use and no process that can be seen holds."""
        told = [holder.bytes for holder in self.holders]
        if self.used_bytes is None or None in told:
            return 0
        return max(0, self.used_bytes - sum(each or 0 for each in told))


@dataclasses.dataclass(frozen=True)
class MachineMemory(Record):
    """Memory of this machine, as this process may take it.

    Args:
        limits: Every limit on the CPU's memory, the machine's own first.
        gpus: The GPUs that TensorFlow uses; none without NVML.
        swap_bytes: Size of the swap, None where it is not told.
        swap_free_bytes: What of it is free.
    """

    limits: tuple[MemoryLimit, ...] = ()
    gpus: tuple[GpuMemory, ...] = ()
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None

    @property
    def limit(self) -> MemoryLimit | None:
        """The smallest limit, which this process meets first; None if none is known."""
        return min(self.limits, key=lambda limit: limit.bytes, default=None)
