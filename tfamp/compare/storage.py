"""The folder of a comparison: what is kept, taken up again, and thrown away."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tfamp.compare import parcel
from tfamp.compare.drift import drift
from tfamp.compare.job import FILE, Job, file_name
from tfamp.evidence import Context, Run, Variant

CONTEXT_FILE = "context.json"


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


def first_reference(policies: Sequence[str]) -> str:
    """Returns the policy whose weights the others' are held against."""
    plain = [policy for policy in policies if Variant.parse(policy).is_float32]
    return (plain or list(policies))[0]


def add_drift(folder: Path, job: Job, runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with the drift of their weights, and writes it down."""
    reference = first_reference(job.policies)
    found = []
    for run in runs:
        if run.is_finished and run.weights_drift is None and run.policy != reference:
            names = [file_name(policy, run.seed) for policy in (reference, run.policy)]
            value = drift(*(folder / f"{name}.npz" for name in names))
            if value is not None:
                run = dataclasses.replace(run, weights_drift=value)
                run.to_json(record_of(folder, run))
        found.append(run)
    return found


def profile_of(folder: Path, policy: str, seed: int) -> Path:
    """Returns where the profile of a run lies."""
    return folder / "profiles" / file_name(policy, seed)


def end(folder: Path, *, is_complete: bool) -> None:
    """Throws away what a finished comparison has no more use for."""
    if not is_complete:
        return
    for path in folder.glob("*_seed*.npz"):
        path.unlink()
    parcel.discard(folder)
