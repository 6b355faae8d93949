"""Does tasks one after another, each in a fresh process, and says why one ended."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from tfamp.machine.limits import sizes_in
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.trials.run_records import Memory, Run, Task
from tfamp.trials.variant import short_names

_POLL_SECONDS = 0.05
# Of the trial that tells what a model holds.
_MEMORY_STEPS = 4


def do(
    folder: Path,
    task: Task,
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[float], None] = lambda part: None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Does a task in a fresh process; returns what it recorded, or how it failed.

    `environment` has defaults of variables of its environment.

    The exit status of a process without a record is in the outcome, as "status -9";
    one that took too long is "too slow", one that held more than it may "over the
    limit". Whatever interrupts this ends the process too, with all that it started.
    """
    record = folder / f"{task.name}.json"
    log, part = record.with_suffix(".log"), record.with_suffix(".part")
    record.unlink(missing_ok=True)
    status, began = None, time.monotonic()
    # It finds the same modules as this process.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", **(environment or {})}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tfamp.trials.worker", folder, task.to_json()],
            stdin=subprocess.PIPE,  # its end tells the process that this one is gone
            stdout=output,
            stderr=subprocess.STDOUT,
            env=defaults | os.environ | {"PYTHONPATH": paths},
            # Ctrl-C reaches this process only, which then ends the other.
            start_new_session=True,
        )
    limit, held = timeout_seconds or float("inf"), 0
    # On a GPU TensorFlow itself keeps to what is allowed.
    is_on_gpu = bool(tf.config.get_visible_devices("GPU"))
    most = float("inf") if is_on_gpu else task.allowed_bytes or float("inf")
    try:
        while status is None and held <= most and time.monotonic() - began < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_SECONDS)
            held = sizes_in(Path(f"/proc/{process.pid}/status")).get("VmRSS", 0)
            with contextlib.suppress(OSError, ValueError):  # not there, or half of it
                on_progress(float(part.read_text()))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        part.unlink(missing_ok=True)
        if process.stdin is not None:
            process.stdin.close()
    found = Run(task.policy, task.seed, "failed")
    if record.is_file():
        found = Run.from_json(record)
        if found.is_finished or found.error or found.outcome:
            return found
    if held > most:
        memory = Memory(0, training_bytes=held)
        return dataclasses.replace(found, outcome="over the limit", memory=memory)
    why, outcome = f"it took longer than {limit:g} s", "too slow"
    if status is not None:
        why, outcome = "the process ended and told no figures", f"status {status}"
        if status < 0:
            why = f"{signal.Signals(-status).name} ended the process"
        if status == -signal.SIGKILL:
            why += ": the system killed it, most often for want of memory"
    return dataclasses.replace(found, error=why, outcome=outcome)


def tail(log: Path, lines: int = 15) -> str:
    """Returns the last lines of a log."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def run_all(
    folder: Path,
    policies: Sequence[str],
    seeds: Sequence[int],
    task: Task,
    *,
    check: Callable[[Run], None],
    on_run: Callable[[Run], None],
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
    unit = f"of {len(pairs)} runs"
    try:
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
                    run = do(folder, given, on_progress=tell)
                    if run.is_finished and seed == seeds[0]:
                        run = _with_memory(folder, given, run)
                if not run.is_finished and not runs:
                    raise RuntimeError(
                        f"The first run, {policy!r} with seed {seed}, failed: "
                        f"{run.error}. Expected it to train; mend what its log ends "
                        f"with:\n{tail(record.with_suffix('.log'))}"
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


def _with_memory(folder: Path, task: Task, run: Run) -> Run:
    """Returns a run with the memory of a few steps in a process of their own."""
    few = dataclasses.replace(task, steps=_MEMORY_STEPS, batch_size=run.batch_size)
    found = do(folder, few)
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
