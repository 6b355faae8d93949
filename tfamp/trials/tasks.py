"""What trials are asked, and the folder that they share."""

import contextlib
import dataclasses
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.trials.variant import Variant

# In the folder: where runs were measured, and what all of them share.
CONTEXT, _JOB = "context.json", "job.json"


@dataclasses.dataclass(frozen=True)
class Task(Record):
    """What one process does: a whole training, or a few steps of one batch size."""

    policy: str  # as `Variant` reads it
    seed: int = 0  # of weights, data order and dropout
    epochs: int = 1
    batch_size: int | None = None  # of arrays, or what is tried
    steps: int = 0  # a few, at least so many; 0 trains whole
    latency_batch_sizes: tuple[int, ...] = ()
    is_fresh: bool = False  # whether memory counts from when the model is built
    allowed_bytes: int | None = None  # what it may hold
    target_batch_size: int | None = None  # examples of one update
    data_batch_size: int | None = None  # None where only the process knows it
    num_examples: int | None = None  # of the data
    command: str = ""  # how to repeat it from a shell

    @property
    def name(self) -> str:
        """What its files are called, without their ending."""
        steps = f"_batch{self.batch_size}" if self.steps else ""
        return file_name(self.policy, self.seed) + steps


@dataclasses.dataclass(frozen=True)
class Facts(Record):
    """What a trial tells of the model and its data, before it trains.

    A batch is a multiple of the `replicas` that share it; `num_examples` of the data
    are None where that is not known. `batch_size` is the one that is tried.
    """

    replicas: int = 1
    num_examples: int | None = None
    model: str = ""
    batch_size: int = 0
    data_batch_size: int | None = None

    def possible(self, size: int) -> int:
        """Returns a batch size as the data and the replicas allow it."""
        if self.num_examples is not None:
            size = min(size, self.num_examples)
        return -(-size // self.replicas) * self.replicas


def file_name(policy: str, seed: int) -> str:
    """Returns what a run's files are called, without their ending."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '-', policy)}_seed{seed}"


def checked_policies(policies: Sequence[Any]) -> tuple[str, ...]:
    """Returns at least two different policies as they are written in full."""
    found = tuple(str(Variant.named(policy)) for policy in policies)
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(
            f"`policies` is {tuple(policies)!r}; expected at least two different ones "
            "to compare. Pass for example ('float32', 'auto')."
        )
    return found


def checked_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Returns different seeds, at least one: 0 to n-1 for a number n."""
    if isinstance(seeds, (list, tuple, range)):
        found = tuple(checks.positive_int("seeds", s, minimum=0) for s in seeds)
    else:
        found = tuple(range(checks.positive_int("seeds", seeds)))
    if not found or len(set(found)) < len(found):
        raise ValueError(
            f"`seeds` is {seeds!r}; expected a number of seeds, or different ones. "
            "Pass for example 5."
        )
    return found


@contextlib.contextmanager
def opened(directory: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Gives the folder of the runs: the user's, or one that goes away again."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="tfamp-compare-") as name:
            yield Path(name)
        return
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    yield path.absolute()


def begin(folder: Path, task: Task, *, resume: bool) -> None:
    """Notes in a folder what all its runs share, or raises where others are there."""
    path = folder / _JOB
    if not path.exists():
        task.to_json(path)
        return
    is_other = Task.from_json(path) != task
    if not resume or is_other:
        what = "other settings" if is_other else "an earlier comparison"
        raise ValueError(
            f"`directory` is {str(folder)!r}, which has runs of {what}; expected an "
            "empty folder, or the same settings and `resume=True`. Pass another."
        )


def plan_file(folder: Path, policy: Any) -> Any:
    """Returns the path of a plan's file in a folder; any other policy as it is."""
    if not isinstance(policy, PrecisionPlan):
        return policy
    digest = hashlib.sha256(policy.to_json().encode()).hexdigest()[:8]
    path = folder / f"plan-{digest}.json"
    policy.to_json(path)
    return str(path)


def is_plan_file(path: str) -> bool:
    """States whether a plan's file is one that `plan_file` wrote."""
    return re.fullmatch(r"plan-[0-9a-f]{8}\.json", os.path.basename(path)) is not None
