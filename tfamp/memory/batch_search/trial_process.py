"""A trial seen from outside: starts its process, waits, and says how it ended."""

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

from tfamp.memory.batch_search import outcomes
from tfamp.memory.batch_search.plan import ANSWER, FACTS
from tfamp.memory.batch_search.records import Trial
from tfamp.memory.batch_search.search import Facts
from tfamp.trials import processes

MODULE = "tfamp.memory.batch_search.trial"
# Of a log, what is looked through for words of memory.
_LOG_CHARACTERS = 20_000


def try_size(folder: Path, size: int, *, timeout_seconds: float) -> Trial:
    """Tries a batch size in a fresh process.

    Args:
        folder: Where plan, settings and parcel lie; the log goes there.
        size: Examples of a step.
        timeout_seconds: The most that it may take.

    Returns:
        The trial, of a size that data and replicas allow.

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
    outcome = outcomes.of_status(status, text)
    why = processes.why_ended(status)
    if outcome is None:
        raise RuntimeError(_failed(size, why, log))
    return Trial(size, outcome, detail=why, began_training=began)


def facts_of(folder: Path) -> dict[str, Any]:
    """Returns what the last trial noted before it trained, nothing if it did not."""
    file = folder / FACTS
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def facts(noted: dict[str, Any]) -> Facts:
    """Returns of what was noted that which sizes depend on.

    Example:
        >>> facts({"replicas": 2, "model": "mlp"})
        Facts(replicas=2, num_examples=None)
    """
    return Facts(noted.get("replicas", 1), noted.get("num_examples"))


def _run(folder: Path, size: int, log: Path, timeout_seconds: float) -> int | None:
    """Returns the status of the trial's process, None where it took too long."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            processes.command(MODULE, [str(folder), str(size)]),
            # Held open: its end tells the trial that this process is gone.
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=processes.environment(),
            # Ctrl-C reaches this process only, which then ends the other.
            start_new_session=True,
        )
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()


def _failed(size: int, why: str, log: Path) -> str:
    return (
        f"The trial of batch size {size} failed, and not for want of memory: {why}. "
        "Expected `build_model` and its data to train; mend what the log ends with:\n"
        f"{processes.tail(log)}"
    )
