"""Fresh processes of tfamp: started, watched, and why they ended."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tfamp.trials.run_records import Run
from tfamp.trials.storage import file_name

_CHILD = "tfamp.trials.child"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5
_TAIL_LINES = 15
# Of Linux's prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_SIGNALS = {
    "SIGKILL": "the system killed it, most often for want of memory",
    "SIGILL": "the processor does not know an instruction that TensorFlow used; "
    "`tfamp doctor` tells which",
    "SIGSEGV": "it touched memory that is not its own",
    "SIGABRT": "TensorFlow gave up; its log says why",
}


class RunProcess:
    """Trains once in a fresh process, for at most `timeout_seconds`.

    `part_done` of its training is done.
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        seed: int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[["RunProcess"], None] = lambda process: None,
    ) -> None:
        self.policy, self.seed = policy, seed
        self._on_progress = on_progress
        self.part_done = 0.0
        self._folder, self._timeout = folder, timeout_seconds
        self._status, self._is_late = 0, False

    def run(self) -> None:
        """Runs it to its end; whatever interrupts this ends it too."""
        name = file_name(self.policy, self.seed)
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        words = [str(self._folder), self.policy, str(self.seed)]
        with uninterrupted():
            process, reading = start_with_pipe(
                _CHILD, words, self._folder / f"{name}.log"
            )
        try:
            self._is_late = not self._watch(reading)
            if not self._is_late:
                self._status = process.wait()
        finally:
            os.close(reading)
            if process.poll() is None:
                end(process)
            close_input(process)

    def _watch(self, reading: int) -> bool:
        """Follows what a process tells until it ends; False where that is too late."""
        began = time.monotonic()
        while True:
            ready, _, _ = select.select([reading], [], [], _POLL_SECONDS)
            if ready:
                told = os.read(reading, 4096).decode()
                if not told:  # its end of the pipe is closed
                    return True
                self.part_done = float(told.split()[-1])
            self._on_progress(self)
            if self._timeout is not None and time.monotonic() - began >= self._timeout:
                return False

    def result(self) -> Run:
        """Returns the record that it left, or one of how it failed."""
        why = f"it took longer than {self._timeout or 0:g} s"
        if not self._is_late:
            record = self._folder / f"{file_name(self.policy, self.seed)}.json"
            if record.is_file():
                return Run.from_json(record)
            why = why_ended(self._status)
        return Run(self.policy, self.seed, status="failed", error=why)


class Line:
    """The other end of a run's pipe, which tells how far it is.

    It writes to a file descriptor, None for nothing.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def tell(self, part: float) -> None:
        """Tells which part of the training is done, in [0, 1]."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{part:.4f}\n".encode())


def end_with_parent() -> None:
    """Ends this process with the one that started it, on Linux."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    pass_fds: tuple[int, ...] = (),
    variables: Mapping[str, str | None] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a module of tfamp in a fresh process, which prints into a log.

    It finds the same modules as this process. `variables` are set in its environment
    besides, and left out where they are None.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    environ = {**quiet, **os.environ, "PYTHONPATH": paths, **(variables or {})}
    with open(log, "wb") as output:
        return subprocess.Popen(
            command(module, arguments),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in environ.items() if v is not None},
            pass_fds=pass_fds,
            # Ctrl-C reaches this process only, which then ends the other.
            start_new_session=True,
        )


def start_with_pipe(
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    variables: Mapping[str, str | None] | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a module as `start` does, with the end of a pipe as its last argument.

    Returns the process and the descriptor to read what it tells.
    """
    reading, writing = os.pipe()
    words, ends = [*arguments, str(writing)], (writing,)
    try:
        return start(module, words, log, pass_fds=ends, variables=variables), reading
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets Ctrl-C wait until the block ends, so that what it starts is known."""
    handler, pressed = signal.getsignal(signal.SIGINT), []
    # Only the main thread gets signals.
    here, main = threading.current_thread(), threading.main_thread()
    if here is not main or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(pressed[0], None)


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Closes the standard input of a process that may have ended."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs a module of tfamp with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force if it does not go."""
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def why_ended(status: int) -> str:
    """Returns why a process ended without a record, from its exit status."""
    if status >= 0:
        return f"the process ended with status {status} and left no record"
    name = signal.Signals(-status).name
    return f"{name} ended the process: {_SIGNALS.get(name, 'somebody sent it')}"


def tail(log: Path) -> str:
    """Returns the last lines of a log."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
