"""Fresh processes of tfamp: started, followed, and why they ended."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5
_SIGNALS = {
    "SIGKILL": ": the system killed it, most often for want of memory",
    "SIGILL": ": the processor lacks an instruction; `tfamp doctor` tells which",
}


def run(
    module: str,
    arguments: Sequence[str],
    log: Path,
    *,
    timeout_seconds: float | None = None,
    on_progress: Callable[[float], None] = lambda part: None,
) -> int | None:
    """Runs a module of tfamp to its end in a fresh process, which prints into a log.

    Its last argument is the end of a pipe, where it tells which part is done, in lines
    with a number. Whatever interrupts this ends the process too. Returns its exit
    status; None where it took longer than it may.
    """
    reading, writing = os.pipe()
    began, part, process = time.monotonic(), 0.0, None
    try:
        with uninterrupted(), open(log, "wb") as output:
            # It finds the same modules as this process.
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, str(writing)],
                # Held open: its end tells the process that this one is gone.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": paths},
                pass_fds=(writing,),
                # Ctrl-C reaches this process only, which then ends the other.
                start_new_session=True,
            )
            os.close(writing)
        while True:
            if select.select([reading], [], [], _POLL_SECONDS)[0]:
                told = os.read(reading, 4096).decode()
                if not told:  # its end of the pipe is closed
                    return process.wait()
                part = float(told.split()[-1])
            elif process.poll() is not None:  # workers of its own may hold that end
                return process.returncode
            on_progress(part)
            if timeout_seconds and time.monotonic() - began >= timeout_seconds:
                return None
    finally:
        os.close(reading)
        if process is not None:
            end(process)


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


def end_with_parent() -> None:
    """Ends this process once the one that started it, and held its input, is gone."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, by force if it does not go, and closes its input."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def why_ended(status: int) -> str:
    """Returns why a process ended without a record, from its exit status."""
    if status >= 0:
        return f"the process ended with status {status} and left no record"
    name = signal.Signals(-status).name
    return f"{name} ended the process{_SIGNALS.get(name, '')}"


def tail(log: Path, lines: int = 15) -> str:
    """Returns the last lines of a log."""
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
