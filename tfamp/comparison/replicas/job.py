"""What the processes of a measurement have in common, as a file that they read."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

from tfamp.records.record import Record

Kind = Literal["logical CPUs", "GPUs", "workers"]
Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


@dataclasses.dataclass(frozen=True)
class ReplicaJob(Record):
    """The settings of a measurement.

    Args:
        title: What is trained.
        kind: What the replicas are: "logical CPUs" or "GPUs" of one process, or
            "workers", a process each.
        batch_size: Examples of a step on one device; None takes the data's.
        seconds: For `bottleneck`.
    """

    FILE: ClassVar[str] = "replicas.json"

    title: str
    kind: Kind
    batch_size: int | None = None
    seconds: float = 10.0


def size_of(mode: Mode, batch_size: int, replicas: int) -> int:
    """Returns the examples of a step of all replicas together.

    Strong scaling divides the batch of one device, weak scaling gives each replica one.

    Example:
        >>> size_of("strong", 32, 4), size_of("weak", 32, 4)
        (32, 128)
    """
    return batch_size * replicas if mode == "weak" else batch_size


def state_file(folder: Path, replicas: int) -> Path:
    """Returns where the state after the first steps of so many replicas is kept."""
    return folder / f"state_{replicas}.npz"


def log_file(folder: Path, replicas: int, index: int) -> Path:
    """Returns where a process prints to."""
    return folder / f"replicas_{replicas}_process_{index}.log"


Answer = dict[str, Any]
