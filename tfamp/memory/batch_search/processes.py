"""A trial seen from outside: starts its process, waits, and says how it ended."""

import dataclasses
import errno
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.memory.batch_search.records import Outcome, Trial
from tfamp.memory.batch_search.search import MAX_BATCH_SIZE, TrialFacts, search
from tfamp.memory.batch_search.settings import FILE as SETTINGS
from tfamp.memory.batch_search.settings import Settings
from tfamp.records.record import Record
from tfamp.trials import processes

# TensorFlow's allocator tells so of memory that it can do without.
_HARMLESS = "not a failure"
# A thread whose stack finds no room, as under `ulimit -v`.
_NO_STACK = re.compile(r"pthread_create(\(\))? failed")
_XLA = re.compile(r"\bxla|hlo|while trying to allocate", re.IGNORECASE)
# What a trial leaves: facts before it trains, and its answer.
FACTS, ANSWER = "facts.json", "answer.json"
MODULE = "tfamp.memory.batch_search.trial"
# Of a log, what is looked through for words of memory.
_LOG_CHARACTERS = 20_000
# Of the trials of `largest_batch`: the second step holds what the first one made.
_STEPS, _TIMEOUT_SECONDS = 2, 600.0


def of_error(error: BaseException) -> Outcome | None:
    """Returns how a trial that raised this ended, None if not for want of memory."""
    seen: BaseException | None = error
    while seen is not None:
        is_refused = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        if isinstance(seen, MemoryError) or is_refused:
            return "MemoryError"
        if is_out_of_memory(seen):
            if _XLA.search(str(seen)):
                return "XLA out of memory"
            is_exhausted = isinstance(seen, tf.errors.ResourceExhaustedError)
            return "ResourceExhaustedError" if is_exhausted else "out of memory"
        seen = seen.__cause__
    return None


def of_status(status: int, log: str) -> Outcome | None:
    """Returns how a process without an answer ended, None if not for want of memory.

    The kernel kills by SIGKILL. C++ ends a process by SIGABRT or SIGSEGV for many
    reasons, so there the end of the log has to speak of memory.
    """
    if status == -signal.SIGKILL:
        return "killed"
    lines = [line for line in log.splitlines() if _HARMLESS not in line]
    if any(is_out_of_memory(RuntimeError(x)) or _NO_STACK.search(x) for x in lines):
        return "killed" if status < 0 else "out of memory"
    return None


@dataclasses.dataclass(frozen=True)
class TrialSettings(Record):
    """The settings of a search that its trials need.

    Args:
        title: What is trained.
        steps: Steps to time, at least.
        allowed_bytes: What a trial may hold; None where there is no limit.
        target_batch_size: Examples of one update, None where that is left open.
        data_batch_size: Examples of a batch of the data; None where only
            `build_model` or a function knows it.
        num_examples: Examples of the data, None where that is not known.
    """

    FILE: ClassVar[str] = "plan.json"

    title: str
    steps: int
    allowed_bytes: int | None = None
    target_batch_size: int | None = None
    data_batch_size: int | None = None
    num_examples: int | None = None


def try_size(folder: Path, size: int, *, timeout_seconds: float) -> Trial:
    """Tries a batch size in a fresh process, as data and replicas allow it.

    Raises:
        RuntimeError: The process failed, and not for want of memory.
    """
    answer, log = folder / ANSWER, folder / f"batch_{size}.log"
    for file in (answer, folder / FACTS):
        file.unlink(missing_ok=True)
    status = _run(folder, size, log, timeout_seconds)
    noted = facts_of(folder)
    began, size = bool(noted), noted.get("batch_size", size)
    if answer.is_file():
        found = json.loads(answer.read_text())
        if found["outcome"] == "error":
            raise RuntimeError(_failed(size, found["detail"], log))
        return Trial(size, **found, began_training=began)
    if status is None:
        detail = f"It was ended after {timeout_seconds:g} s."
        return Trial(size, "too slow", detail=detail, began_training=began)
    text = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
    outcome = of_status(status, text)
    why = processes.why_ended(status)
    if outcome is None:
        raise RuntimeError(_failed(size, why, log))
    return Trial(size, outcome, detail=why, began_training=began)


def largest_batch(folder: Path, policy: str, start: int, max_memory_bytes: int) -> int:
    """Returns the largest batch that trains below a limit, 0 where none does.

    `parcel.pack` laid model and data into the folder; the rows of a batch are repeated,
    so that the data set no limit. On a GPU the limit is TensorFlow's.

    Raises:
        RuntimeError: A trial failed, and not for want of memory.
    """
    plan = TrialSettings("", _STEPS, max_memory_bytes, data_batch_size=start)
    plan.to_json(folder / TrialSettings.FILE)
    Settings.present(policy).write(folder)
    found = search(
        lambda size: try_size(folder, size, timeout_seconds=_TIMEOUT_SECONDS),
        start=start,
        caps={"max_batch_size": MAX_BATCH_SIZE},
        min_gain=None,
        facts=lambda: facts(facts_of(folder)),
    )
    for name in (TrialSettings.FILE, SETTINGS, FACTS, ANSWER):
        (folder / name).unlink(missing_ok=True)
    return 0 if found.chosen is None else found.chosen.batch_size


def facts_of(folder: Path) -> dict[str, Any]:
    """Returns what the last trial noted before it trained, nothing if it did not."""
    file = folder / FACTS
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def facts(noted: dict[str, Any]) -> TrialFacts:
    """Returns of what was noted that which sizes depend on."""
    return TrialFacts(noted.get("replicas", 1), noted.get("num_examples"))


def _run(folder: Path, size: int, log: Path, timeout_seconds: float) -> int | None:
    """Returns the status of the trial's process, None where it took too long."""
    # Its input is held open: the end of it tells the trial that this process is gone.
    process = processes.start(MODULE, [str(folder), str(size)], log)
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
        processes.close_input(process)


def _failed(size: int, why: str, log: Path) -> str:
    return (
        f"The trial of batch size {size} failed, and not for want of memory: {why}. "
        "Expected `build_model` and its data to train; mend what the log ends with:\n"
        f"{processes.tail(log)}"
    )
