"""The process of a run, seen from outside: starts it, lets it go on, says why it ended.

Its standard input gets an answer each time it may go on; a pipe brings what it tells.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tfamp.trials import turns
from tfamp.trials.job import file_name
from tfamp.trials.run_records import Run

_CHILD = "tfamp.trials.run.child"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5
_TAIL_LINES = 15
_NOTHING: Mapping[str, str | None] = {}
_SIGNALS = {
    "SIGKILL": "the system killed it, most often for want of memory",
    "SIGILL": (
        "the processor does not know an instruction that TensorFlow used; "
        "`tfamp doctor` tells which"
    ),
    "SIGSEGV": "it touched memory that is not its own",
    "SIGABRT": "TensorFlow gave up; its log says why",
}


class RunProcess:
    """Trains once in a fresh process, for at most `timeout_seconds` without its waits.

    `takes_turns` has it wait after about a second of training each; `part_done` of its
    training is done, and it `has_met` others while it waits for them to come as far.
    """

    def __init__(
        self,
        folder: Path,
        policy: str,
        seed: int,
        *,
        takes_turns: bool = True,
        timeout_seconds: float | None = None,
        on_progress: Callable[["RunProcess"], None] = lambda process: None,
    ) -> None:
        self.policy, self.seed = policy, seed
        self._on_progress = on_progress
        self.part_done, self.has_met = 0.0, False
        self._folder, self._takes_turns = folder, takes_turns
        self._timeout, self._used = timeout_seconds, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = -1
        self._is_late = False

    @property
    def pid(self) -> int | None:
        """The number of the process, None before it is started."""
        return None if self._process is None else self._process.pid

    def go_on(self) -> bool:
        """Starts it, or lets it go on, until it has had its turn or has ended."""
        if self._process is None:
            self._start()
        else:
            self._answer()
        began = time.monotonic()
        try:
            return self._follow(began)
        finally:
            self._used += time.monotonic() - began

    def result(self) -> Run:
        """Returns the record that it left, or one of how it failed."""
        if self._is_late:
            why = f"it took longer than {self._timeout:g} s"
            return Run(self.policy, self.seed, status="failed", error=why)
        record = self._folder / f"{file_name(self.policy, self.seed)}.json"
        if record.is_file():
            return Run.from_json(record)
        status = self._process.wait() if self._process is not None else 0
        return Run(self.policy, self.seed, status="failed", error=why_ended(status))

    def end(self) -> None:
        """Ends the process, if it still runs."""
        if self._process is not None:
            self._signal("SIGCONT")
            end(self._process)
            self._close()

    def _start(self) -> None:
        name = file_name(self.policy, self.seed)
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        self._reading, writing = os.pipe()
        words = [str(self._folder), self.policy, str(self.seed), str(writing)]
        if self._takes_turns:
            words.append("in_turns")
        log = self._folder / f"{name}.log"
        self._process = start(_CHILD, words, log, pass_fds=(writing,))
        os.close(writing)

    def _answer(self) -> None:
        stream = self._process.stdin if self._process is not None else None
        if stream is not None:
            self._signal("SIGCONT")
            with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                stream.write(b"go\n")
                stream.flush()

    def _follow(self, began: float) -> bool:
        def set_part(part: float) -> None:
            self.part_done = part

        waits_for: set[str] = set()
        while True:
            ready, _, _ = select.select([self._reading], [], [], _POLL_SECONDS)
            if ready:
                words = os.read(self._reading, 4096)
                if not words:  # its end of the pipe is closed
                    if self._process is not None:
                        self._process.wait()
                    self._close()
                    return False
                waits_for |= turns.read(words.decode(), set_part)
            self._on_progress(self)
            if turns.TURN in waits_for:
                self.has_met = turns.MEETING in waits_for
                # Its input pipeline would go on filling its buffers otherwise, from
                # which it would train too fast when it has its turn.
                self._signal("SIGSTOP")
                return True
            used = self._used + time.monotonic() - began
            if self._timeout is not None and used >= self._timeout:
                self._is_late = True
                self.end()
                return False

    def _signal(self, name: str) -> None:
        """Stops or continues the processes of the run, where they end with this one."""
        if sys.platform == "linux" and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, getattr(signal, name))

    def _close(self) -> None:
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1
        if self._process is not None:
            close_input(self._process)


def start(
    module: str,
    arguments: list[str],
    log: Path,
    *,
    pass_fds: tuple[int, ...] = (),
    variables: Mapping[str, str | None] = _NOTHING,
) -> subprocess.Popen[bytes]:
    """Starts a module of tfamp in a fresh process, which prints into a log.

    `variables` are set in its environment besides, and left out where they are None.
    """
    environ = {**environment(), **variables}
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


def close_input(process: subprocess.Popen[bytes]) -> None:
    """Closes the standard input of a process that may have ended."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def command(module: str, arguments: list[str]) -> list[str]:
    """Returns the command that runs a module of tfamp with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Returns the variables of a run's process, which finds the same modules."""
    paths = [path or os.getcwd() for path in sys.path]
    found = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return found


def end(process: subprocess.Popen[bytes]) -> int:
    """Ends a process, by force if it does not go; returns its status."""
    process.terminate()
    try:
        return process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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
