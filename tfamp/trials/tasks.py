"""What trials are asked, and the folder that they share: settings, records, plans."""

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
from tfamp.trials.run_records import Context, Run
from tfamp.trials.variant import Variant

# In the folder: a comparison's settings, where it was measured, and pickled settings
# that hold in the trials in place of those of their policy.
JOB, CONTEXT, SETTINGS = "job.json", "context.json", "settings.pickle"


@dataclasses.dataclass(frozen=True)
class Task(Record):
    """What one process does: a whole training, or a few steps of one batch size.

    Args:
        policy: As `Variant` reads it.
        seed: Of weights, data order and dropout.
        epochs: Passes over the training data.
        batch_size: For arrays, None for Keras's 32; of a few steps, what is tried.
        steps: A few, at least so many; 0 trains whole.
        latency_batch_sizes: Examples in the timed calls of a trained model.
        keeps_batches: Whether a whole training leaves two batches for a few steps.
        is_fresh: Whether what few steps hold is told apart from what was there before.
        allowed_bytes: What it may hold; None where there is no limit.
        target_batch_size: Examples of one update, None where that is left open.
        data_batch_size: Of a batch of the data, None where only the process knows it.
        num_examples: Of the data, None where that is not known.
        command: How to repeat it from a shell, for the record.
    """

    policy: str
    seed: int = 0
    epochs: int = 1
    batch_size: int | None = None
    steps: int = 0
    latency_batch_sizes: tuple[int, ...] = ()
    keeps_batches: bool = False
    is_fresh: bool = False
    allowed_bytes: int | None = None
    target_batch_size: int | None = None
    data_batch_size: int | None = None
    num_examples: int | None = None
    command: str = ""

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


@dataclasses.dataclass(frozen=True)
class Job(Record):
    """The settings of a comparison, which its runs have to share.

    Policies and seeds may be others when it goes on: their runs stand for themselves.
    `source` is the fingerprint of the file that the model is built by.
    """

    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int | None = None
    latency_batch_sizes: tuple[int, ...] = (1, 8, 32)
    source: str = ""

    def order(self) -> tuple[tuple[str, int], ...]:
        """Returns policies and seeds in the order they are run.

        All policies of a seed follow one another, so that a machine that gets slower
        slows them alike, and each goes first in its turn.

        Example:
            >>> Job(("a", "b"), (0, 1), 1).order()
            (('a', 0), ('b', 0), ('b', 1), ('a', 1))
        """
        count = len(self.policies)
        return tuple(
            (self.policies[(turn + place) % count], seed)
            for turn, seed in enumerate(self.seeds)
            for place in range(count)
        )


def file_name(policy: str, seed: int) -> str:
    """Returns what a run's files are called, without their ending.

    Example:
        >>> file_name("keras:float32+xla", 3), file_name("runs/plan.json", 0)
        ('keras-float32+xla_seed3', 'runs-plan.json_seed0')
    """
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '-', policy)}_seed{seed}"


def fingerprint(function: Any) -> str:
    """Returns a digest of the file that a function stands in, "" where there is none.

    Notebooks and prompts have no file, so there the function's own text is taken.
    """
    function, text = inspect.unwrap(function), b""
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
    path = folder / JOB
    if path.exists() and not resume:
        raise ValueError(
            f"`directory` is {str(folder)!r}, which has runs of an earlier comparison; "
            "expected an empty folder. Pass `resume=True` to go on with them, or "
            "another folder."
        )
    if path.exists():
        before, now = Job.from_json(path).to_dict(), job.to_dict()
        shown = [
            f"{name} was {before[name]!r} and is {value!r}"
            for name, value in now.items()
            if name not in ("policies", "seeds") and before[name] != value
        ]
        if shown:
            raise ValueError(
                f"The runs in {str(folder)!r} cannot go on: {'; '.join(shown)}. "
                "Expected the same settings and source. Set them as they were, or "
                "begin in another folder."
            )
    job.to_json(path)
    records = (folder / f"{file_name(*each)}.json" for each in job.order())
    runs = [Run.from_json(record) for record in records if record.is_file()]
    return [run for run in runs if run.is_finished]


def context(folder: Path) -> Context | None:
    """Returns where the runs were measured, None if no run got so far."""
    path = folder / CONTEXT
    return Context.from_json(path) if path.is_file() else None
