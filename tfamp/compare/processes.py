"""Starts the process of a run, follows it, and says why it ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tfamp.compare.job import file_name
from tfamp.evidence import Run

_CHILD = "tfamp.compare.child"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5
_TAIL_LINES = 15
_SIGNALS = {
    "SIGKILL": "the system killed it, most often for want of memory",
    "SIGILL": (
        "the processor does not know an instruction that TensorFlow used; "
        "`tfamp doctor` tells which"
    ),
    "SIGSEGV": "it touched memory that is not its own",
    "SIGABRT": "TensorFlow gave up; its log says why",
}


def run_once(
    folder: Path,
    policy: str,
    seed: int,
    *,
    on_progress: Callable[[float], None] = lambda part: None,
    timeout_seconds: float | None = None,
) -> Run:
    """Trains once in a fresh process and returns its record.

    Args:
        folder: Where the job and the parcel lie; the record and the log go there.
        policy: As in the job.
        seed: Likewise.
        on_progress: Gets the part of the training that is done, now and then.
        timeout_seconds: When to end the process; None lets it run.

    Raises:
        KeyboardInterrupt: The process was ended for it, and no record is left.
    """
    name = file_name(policy, seed)
    record, log = folder / f"{name}.json", folder / f"{name}.log"
    record.unlink(missing_ok=True)
    arguments = [str(folder), policy, str(seed)]
    status, is_late = _follow(
        command(_CHILD, arguments),
        log,
        folder / f"{name}.progress",
        on_progress,
        timeout_seconds,
    )
    if is_late:
        why = f"it took longer than {timeout_seconds:g} s"
        return Run(policy, seed, status="failed", error=why)
    if record.is_file():
        return Run.from_json(record)
    return Run(policy, seed, status="failed", error=why_ended(status))


def why_ended(status: int) -> str:
    """Returns why a process ended without a record, from its exit status.

    Example:
        >>> why_ended(-9)
        'SIGKILL ended the process: the system killed it, most often for want of memory'
    """
    if status >= 0:
        return f"the process ended with status {status} and left no record"
    name = signal.Signals(-status).name
    return f"{name} ended the process: {_SIGNALS.get(name, 'somebody sent it')}"


def tail(log: Path) -> str:
    """Returns the last lines of a log."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def command(module: str, arguments: list[str]) -> list[str]:
    """Returns the command that runs a module of tfamp with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def _follow(
    words: list[str],
    log: Path,
    progress: Path,
    on_progress: Callable[[float], None],
    timeout_seconds: float | None,
) -> tuple[int, bool]:
    """Runs a command to its end; returns its status and whether it was too slow."""
    waited = 0.0
    with open(log, "wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            # Ctrl-C reaches this process only, which then ends the other.
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(_POLL_SECONDS), False
                except subprocess.TimeoutExpired:
                    waited += _POLL_SECONDS
                if timeout_seconds is not None and waited >= timeout_seconds:
                    return _end(process), True
                on_progress(_part_done(progress))
        except BaseException:
            _end(process)
            raise
        finally:
            progress.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """Returns the variables of a run's process, which finds the same modules."""
    paths = [path or os.getcwd() for path in sys.path]
    found = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return found


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _part_done(progress: Path) -> float:
    try:
        return min(max(float(progress.read_text()), 0.0), 1.0)
    except (OSError, ValueError):
        return 0.0  # not begun, or just being written
