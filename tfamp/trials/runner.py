"""Does tasks one after another, each in a process of its own."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.trials import processes
from tfamp.trials.run_records import Run
from tfamp.trials.tasks import Task
from tfamp.trials.variant import short_names

# Of the trial that tells what a model holds.
_MEMORY_STEPS = 4


def do(
    folder: Path,
    task: Task,
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[float], None] = lambda part: None,
) -> Run:
    """Does a task in a fresh process; returns what it recorded, or how it failed.

    The exit status of a process without a record is in the outcome, as "status -9";
    that of one that took too long has the outcome "too slow".
    """
    record, log = folder / f"{task.name}.json", folder / f"{task.name}.log"
    record.unlink(missing_ok=True)
    words = [str(folder), task.to_json()]
    status = processes.run(
        *("tfamp.trials.worker", words, log),
        timeout_seconds=timeout_seconds,
        on_progress=on_progress,
    )
    if record.is_file():
        return Run.from_json(record)
    why, outcome = f"it took longer than {timeout_seconds or 0:g} s", "too slow"
    if status is not None:
        why, outcome = processes.why_ended(status), f"status {status}"
    return Run(task.policy, task.seed, "failed", why, outcome=outcome)


def run_all(
    folder: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    task: Task,
    *,
    check: Callable[[Run], None],
    on_run: Callable[[Run], None],
    timeout_seconds: float | None,
) -> list[Run]:
    """Trains under each policy from each seed; Ctrl-C ends it with what is there.

    Finished runs that the folder has are taken. `check` may refuse the first run,
    before others are run. All policies of a seed follow one another, so that a machine
    that gets slower slows them alike, and each goes first in its turn.
    """
    names, number = short_names(policies), len(policies)
    pairs = [
        (policies[(turn + place) % number], seed)
        for turn, seed in enumerate(seeds)
        for place in range(number)
    ]
    runs: list[Run] = []
    try:
        unit = f"of {len(pairs)} runs"
        with progress("Starting", len(pairs), unit=unit, decimals=1) as show:
            for place, (policy, seed) in enumerate(pairs):
                given = dataclasses.replace(task, policy=policy, seed=seed)
                record = folder / f"{given.name}.json"
                kept = Run.from_json(record) if record.is_file() else None
                if kept is not None and kept.is_finished:
                    runs.append(kept)
                    continue

                def tell(part: float, place: int = place, run: Task = given) -> None:
                    show(place + part, f"{names[run.policy]}, seed {run.seed}")

                tell(0.0)
                own = [run.is_finished for run in runs if run.policy == policy]
                if own and not any(own):
                    why = "left out, since the first run under this policy failed"
                    run = Run(policy, seed, "failed", why)
                else:
                    how = {"timeout_seconds": timeout_seconds}
                    run = do(folder, given, on_progress=tell, **how)
                    if run.is_finished and seed == seeds[0]:
                        run = _with_memory(folder, given, run, **how)
                if not run.is_finished and not runs:
                    log = processes.tail(folder / f"{given.name}.log")
                    raise RuntimeError(
                        f"The first run, {policy!r} with seed {seed}, failed: "
                        f"{run.error}. Expected it to train; mend what its log ends "
                        f"with:\n{log}"
                    )
                runs.append(run)
                on_run(run)
                if len(runs) == 1:
                    check(run)
    except KeyboardInterrupt:
        finished = [run.seed for run in runs if run.is_finished]
        if len(finished) == len(set(finished)):  # no two can be compared
            raise
        warnings.warn(
            f"Stopped after {len(runs)} of {len(pairs)} runs; the comparison is of "
            "these.",
            UserWarning,
            stacklevel=checks.level_of_user(),
        )
    return runs


def _with_memory(
    folder: Path, task: Task, run: Run, timeout_seconds: float | None
) -> Run:
    """Returns a run with the memory of a few steps in a process of their own.

    There nothing that went before has left memory that they would hide in.
    """
    size = run.batch_size
    few = dataclasses.replace(task, steps=_MEMORY_STEPS, batch_size=size, is_fresh=True)
    found = do(folder, few, timeout_seconds=timeout_seconds)
    if found.memory is not None:
        device = None if run.memory is None else run.memory.device_bytes
        memory = dataclasses.replace(found.memory, device_bytes=device)
        run = dataclasses.replace(run, memory=memory)
    else:
        note = f"The memory of the model is not known: {found.error}"
        run = dataclasses.replace(run, notes=(*run.notes, note))
    for path in folder.glob(f"{few.name}.*"):
        path.unlink()
    run.to_json(folder / f"{task.name}.json")
    return run
