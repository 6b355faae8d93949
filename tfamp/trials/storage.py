"""The settings of a comparison and its folder: what is kept, taken up, thrown away."""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfamp.plan import PrecisionPlan
from tfamp.records import checks
from tfamp.records.record import Record
from tfamp.trials import parcel
from tfamp.trials.run_records import Context, Run
from tfamp.trials.variant import Variant

CONTEXT_FILE = "context.json"


@dataclasses.dataclass(frozen=True)
class Job(Record):
    """The settings of a comparison.

    Args:
        title: What is trained.
        policies: What is compared, as `Variant` reads them.
        seeds: One run for each, under each policy.
        epochs: Passes over the training data.
        batch_size: For arrays; None takes Keras's 32. Datasets have their own.
        latency_batch_sizes: Examples in the timed calls of the trained model.
        source: Fingerprint of the file that the model is built by, "" if unknown.
        command: How to repeat it from a shell, "" if it was called from Python.
    """

    title: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int | None = None
    latency_batch_sizes: tuple[int, ...] = (1, 8, 32)
    source: str = ""
    command: str = ""

    def order(self) -> tuple[tuple[str, int], ...]:
        """Returns policies and seeds in the order they are run.

        All policies of a seed follow one another, so that a machine that gets slower
        slows them alike, and each goes first in its turn.

        Example:
            >>> Job("", ("a", "b"), (0, 1), 1).order()
            (('a', 0), ('b', 0), ('b', 1), ('a', 1))
        """
        count = len(self.policies)
        return tuple(
            (self.policies[(turn + place) % count], seed)
            for turn, seed in enumerate(self.seeds)
            for place in range(count)
        )

    def differences(self, other: "Job") -> tuple[str, ...]:
        """Returns the settings that make runs of another job no runs of this one.

        Policies and seeds may be others: their runs stand for themselves.
        """
        free = ("policies", "seeds", "command", "title")
        return tuple(
            field.name
            for field in dataclasses.fields(self)
            if field.name not in free
            and getattr(self, field.name) != getattr(other, field.name)
        )


def file_name(policy: str, seed: int) -> str:
    """Returns what a run's files are called, without their ending.

    Example:
        >>> file_name("keras:float32+xla", 3)
        'keras-float32+xla_seed3'
        >>> file_name("runs/plan.json", 0)
        'runs-plan.json_seed0'
    """
    word = re.sub(r"[:/\\]", "-", str(Variant.parse(policy)))
    return f"{word}_seed{seed}"


def fingerprint(function: Any) -> str:
    """Returns a digest of the file that a function stands in, "" where there is none.

    Notebooks and prompts have no file, so there the function's own text is taken.
    """
    function = inspect.unwrap(function)
    text = b""
    with contextlib.suppress(OSError, TypeError):
        text = Path(inspect.getsourcefile(function) or "").read_bytes()
    if not text:
        with contextlib.suppress(OSError, TypeError):
            text = inspect.getsource(function).encode()
    return hashlib.sha256(text).hexdigest()[:16] if text else ""


def checked_policies(policies: Sequence[Any] | str) -> tuple[str, ...]:
    """Returns at least two different policies as they are written in full."""
    given = [policies] if isinstance(policies, str) else list(policies)
    found = tuple(str(Variant.named(policy)) for policy in given)
    if len(found) < 2 or len(set(found)) < len(found):
        raise ValueError(
            f"`policies` is {tuple(given)!r}; expected at least two different ones to "
            "compare. Pass for example ('float32', 'auto')."
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
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`directory` is {str(directory)!r}, which cannot be made "
            f"({error.strerror}); expected a folder to keep the runs in. Pass another."
        ) from error
    yield path.absolute()


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


def begin(folder: Path, job: Job, *, resume: bool) -> list[Run]:
    """Writes the job into the folder and returns the finished runs it has.

    A ValueError where there are runs and `resume` is False, or they are of another
    comparison.
    """
    path = folder / FILE
    if not path.exists():
        job.to_json(path)
        return []
    before = Job.from_json(path)
    if not resume:
        raise ValueError(
            f"`directory` is {str(folder)!r}, which has runs of an earlier comparison; "
            "expected an empty folder. Pass `resume=True` to go on with them, or "
            "another folder."
        )
    if differences := job.differences(before):
        shown = "; ".join(
            f"{name} was {getattr(before, name)!r} and is {getattr(job, name)!r}"
            for name in differences
        )
        raise ValueError(
            f"The runs in {str(folder)!r} cannot go on: {shown}. Expected the same "
            "settings and source. Set them as they were, or begin in another folder."
        )
    job.to_json(path)
    records = (folder / f"{file_name(*each)}.json" for each in job.order())
    runs = [Run.from_json(record) for record in records if record.is_file()]
    return [run for run in runs if run.is_finished]


def context(folder: Path) -> Context | None:
    """Returns where the runs were measured, None if no run got so far."""
    path = folder / CONTEXT_FILE
    return Context.from_json(path) if path.is_file() else None


def model_of(folder: Path, policy: str, seed: int) -> Path:
    """Returns where the trained model of a run lies while a comparison goes on."""
    return folder / f"{file_name(policy, seed)}.keras"


def end(folder: Path, *, is_complete: bool) -> None:
    """Throws away what a finished comparison has no more use for."""
    if not is_complete:
        return
    for path in folder.glob("*_seed*.keras"):
        path.unlink()
    parcel.discard(folder)


FILE = "job.json"
