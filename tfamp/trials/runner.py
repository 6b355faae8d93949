"""Does tasks one after another, each in a process of its own."""

import dataclasses
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tfamp.records.console import progress
from tfamp.trials import processes
from tfamp.trials.run_records import Run
from tfamp.trials.tasks import Job, Task, file_name
from tfamp.trials.variant import short_names

WORKER = "tfamp.trials.worker"
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

    The exit status of a process without a record is in the error; that of one that took
    too long has the outcome "too slow", of one that a signal ended "ended by signal".
    """
    record, log = folder / f"{task.name}.json", folder / f"{task.name}.log"
    record.unlink(missing_ok=True)
    words = [str(folder), task.to_json()]
    status = processes.run(
        *(WORKER, words, log), timeout_seconds=timeout_seconds, on_progress=on_progress
    )
    if status is None:
        why = f"it took longer than {timeout_seconds or 0:g} s"
        return Run(task.policy, task.seed, "failed", why, outcome="too slow")
    if record.is_file():
        return Run.from_json(record)
    why = processes.why_ended(status)
    return Run(task.policy, task.seed, "failed", why, outcome=f"status {status}")


def run_all(
    folder: Path,
    job: Job,
    kept: Sequence[Run],
    *,
    command: str,
    check: Callable[[Run], None],
    on_run: Callable[[Run], None],
    timeout_seconds: float | None,
) -> tuple[list[Run], bool]:
    """Runs what is missing of a comparison; returns all and whether Ctrl-C ended it.

    `check` may refuse a finished run, before others are run.
    """
    runs = {(run.policy, run.seed): run for run in kept}
    total, names = len(job.order()), short_names(job.policies)
    for run in kept[:1]:
        check(run)
    try:
        unit = f"of {total} runs"
        with progress("Starting", total, unit=unit, decimals=1) as show:
            for policy, seed in job.order():
                if (policy, seed) in runs:
                    continue
                name, done = f"{names[policy]}, seed {seed}", len(runs)
                show(done, name)
                own = [run.is_finished for run in runs.values() if run.policy == policy]
                if own and not any(own):
                    why = "left out, since the first run under this policy failed"
                    run = Run(policy, seed, "failed", why)
                else:

                    def tell(part: float, done: int = done, name: str = name) -> None:
                        show(done + part, name)

                    run = _trained(
                        *(folder, job, Task(policy, seed, command=command)),
                        timeout_seconds=timeout_seconds,
                        on_progress=tell,
                    )
                if not run.is_finished and not runs:
                    log = folder / f"{file_name(policy, seed)}.log"
                    raise RuntimeError(
                        f"The first run, {policy!r} with seed {seed}, failed: "
                        f"{run.error}. Expected it to train; mend what its log ends "
                        f"with:\n{processes.tail(log)}"
                    )
                runs[policy, seed] = run
                on_run(run)
                if run.is_finished:
                    check(run)
    except KeyboardInterrupt:
        seeds = [run.seed for run in runs.values() if run.is_finished]
        if len(seeds) == len(set(seeds)):  # no two can be compared
            raise
        warnings.warn(
            f"Stopped after {len(runs)} of {total} runs; the comparison is of "
            "these. `resume=True` with the same `directory` does the rest.",
            UserWarning,
            stacklevel=3,
        )
        return list(runs.values()), True
    return list(runs.values()), False


def _trained(
    folder: Path,
    job: Job,
    task: Task,
    *,
    timeout_seconds: float | None,
    on_progress: Callable[[float], None],
) -> Run:
    """Returns a whole training, that of a first seed with the memory of a few steps.

    These run in a process of their own: no data are there, and nothing that went before
    has left memory that they would hide in.
    """
    is_first = task.seed == job.seeds[0]
    task = dataclasses.replace(
        task,
        epochs=job.epochs,
        batch_size=job.batch_size,
        latency_batch_sizes=job.latency_batch_sizes,
        keeps_batches=is_first,
    )
    run = do(folder, task, timeout_seconds=timeout_seconds, on_progress=on_progress)
    batches = folder / f"{task.name}.batches"
    if run.is_finished and batches.is_dir():
        few = dataclasses.replace(
            task, steps=_MEMORY_STEPS, batch_size=run.batch_size, is_fresh=True
        )
        found = do(folder, few, timeout_seconds=timeout_seconds)
        if found.memory is not None and run.memory is not None:
            memory = dataclasses.replace(
                run.memory,
                start_bytes=found.memory.start_bytes,
                training_bytes=found.memory.training_bytes,
                inference_bytes=found.memory.inference_bytes,
            )
            run = dataclasses.replace(run, memory=memory)
        else:
            note = f"The memory of the model is not known: {found.error}"
            run = dataclasses.replace(run, notes=(*run.notes, note))
        for path in folder.glob(f"{few.name}.*"):
            path.unlink()
        run.to_json(folder / f"{task.name}.json")
    shutil.rmtree(batches, ignore_errors=True)
    return run
