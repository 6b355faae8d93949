"""The folder of a comparison: what is kept, taken up again, and thrown away."""

import contextlib
import dataclasses
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.plan import PrecisionPlan
from tfamp.records.record import Record
from tfamp.trials import parcel
from tfamp.trials.job import FILE, Job, file_name
from tfamp.trials.run_records import Context, Run

CONTEXT_FILE = "context.json"
_LOOKS_FILE = "looks.json"


@dataclasses.dataclass(frozen=True)
class Looks(Record):
    """What was judged at each look at the runs of a folder.

    Args:
        judged: The metric, and the files of the finished runs by name.
    """

    judged: tuple[tuple[str, ...], ...] = ()


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

    Raises:
        ValueError: There are runs and `resume` is False, or they are of another
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
    kept = []
    for policy, seed in job.order():
        record = folder / f"{file_name(policy, seed)}.json"
        if record.is_file():
            run = Run.from_json(record)
            if run.is_finished:
                kept.append(run)
    return kept


def look(folder: Path, runs: Sequence[Run], metric: str) -> int:
    """Returns the number of this look at runs, from 1, and writes it down.

    The same runs judged by the same metric again are no further look.
    """
    path = folder / _LOOKS_FILE
    looks = Looks.from_json(path) if path.is_file() else Looks()
    names = sorted(file_name(run.policy, run.seed) for run in runs if run.is_finished)
    seen = (metric, *names)
    if seen not in looks.judged:
        looks = Looks((*looks.judged, seen))
        looks.to_json(path)
    return looks.judged.index(seen) + 1


def log_of(folder: Path, run: Run) -> Path:
    """Returns the log of a run."""
    return folder / f"{file_name(run.policy, run.seed)}.log"


def record_of(folder: Path, run: Run) -> Path:
    """Returns the record of a run."""
    return folder / f"{file_name(run.policy, run.seed)}.json"


def context(folder: Path) -> Context | None:
    """Returns where the runs were measured, None if no run got so far."""
    path = folder / CONTEXT_FILE
    return Context.from_json(path) if path.is_file() else None


def add_drift(folder: Path, runs: Sequence[Run], reference: str) -> list[Run]:
    """Returns the runs with the drift of their weights from the reference's.

    A drift that was measured from another reference is measured anew where the weights
    are still there, and left out where they are not. Records that change are written.
    """
    return [_with_drift(folder, run, reference) for run in runs]


def drift(reference: Path, other: Path) -> float | None:
    """Returns how far a run's weights ended from the reference's, as a part of its way.

    The distance between the ends over the distance that the reference went from its
    start, both over all trainable weights: 0 for the same weights, about 1 where the
    two have nothing but the start in common. float32 with another order of sums drifts
    as well, the more the longer it trains. None where one of them is missing, where the
    shapes differ, or where the reference did not move.
    """
    if not (reference.is_file() and other.is_file()):
        return None
    with np.load(reference) as first, np.load(other) as second:
        count = sum(name.startswith("after") for name in first.files)
        apart = way = 0.0
        for i in range(count):
            end = first[f"after_{i}"].astype(np.float64)
            if f"after_{i}" not in second or second[f"after_{i}"].shape != end.shape:
                return None
            apart += float(np.sum((second[f"after_{i}"] - end) ** 2))
            way += float(np.sum((end - first[f"before_{i}"]) ** 2))
    return (apart / way) ** 0.5 if way > 0 else None


def _with_drift(folder: Path, run: Run, reference: str) -> Run:
    value = None
    if run.is_finished and run.policy != reference:
        if run.drift_from == reference:
            return run
        names = [file_name(policy, run.seed) for policy in (reference, run.policy)]
        value = drift(*(folder / f"{name}.npz" for name in names))
    measured_from = "" if value is None else reference
    changed = dataclasses.replace(run, weights_drift=value, drift_from=measured_from)
    if changed != run:
        changed.to_json(record_of(folder, run))
    return changed


def model_of(folder: Path, policy: str, seed: int) -> Path:
    """Returns where the trained model of a run lies while a comparison goes on."""
    return folder / f"{file_name(policy, seed)}.keras"


def profile_of(folder: Path, policy: str, seed: int) -> Path:
    """Returns where the profile of a run lies."""
    return folder / "profiles" / file_name(policy, seed)


def end(folder: Path, *, is_complete: bool) -> None:
    """Throws away what a finished comparison has no more use for."""
    if not is_complete:
        return
    for path in (*folder.glob("*_seed*.npz"), *folder.glob("*_seed*.keras")):
        path.unlink()
    parcel.discard(folder)
