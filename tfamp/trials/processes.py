"""Fresh processes of tfamp: started, told to go on in turns, and why they ended.

Turns last about a second, so that what slows the machine down slows all policies alike.
A process that has had its turn says so through a pipe and waits; its standard input
gets an answer when it may go on.
"""

import collections
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tfamp.records import checks
from tfamp.trials.run_records import Run
from tfamp.trials.storage import file_name

_CHILD = "tfamp.trials.child"
_TURN, _MEETING = "turn", "meet"
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5
_TAIL_LINES = 15
# What is free has to hold so many times the largest process that waits.
_ROOM = 1.5
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
    """Trains once in a fresh process, for at most `timeout_seconds` without its waits.

    It waits after about a second of training each; `part_done` of its training is done,
    and it `has_met` others while it waits for them to come as far.
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
        self.part_done, self.has_met = 0.0, False
        self._folder, self._timeout, self._used = folder, timeout_seconds, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = -1
        self._is_late = False

    @property
    def pid(self) -> int | None:
        """The number of the process, None before it is started."""
        return None if self._process is None else self._process.pid

    def go_on(self) -> bool:
        """Starts it or lets it go on, until its turn is over (True) or it has ended."""
        if self._process is None:
            self._start()
        elif self._process.stdin is not None:
            self._signal("SIGCONT")
            with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                self._process.stdin.write(b"go\n")
                self._process.stdin.flush()
        waits_for: set[str] = set()
        began, used = time.monotonic(), self._used
        while True:
            ready, _, _ = select.select([self._reading], [], [], _POLL_SECONDS)
            self._used = used + time.monotonic() - began
            if ready:
                words = os.read(self._reading, 4096)
                if not words:  # its end of the pipe is closed
                    if self._process is not None:
                        self._process.wait()
                    self._close()
                    return False
                for word in words.decode().split():
                    if word in (_TURN, _MEETING):
                        waits_for.add(word)
                    else:
                        self.part_done = float(word)
            self._on_progress(self)
            if _TURN in waits_for:
                self.has_met = _MEETING in waits_for
                # Its input pipeline would go on filling its buffers otherwise, from
                # which it would train too fast when it has its turn.
                self._signal("SIGSTOP")
                return True
            if self._timeout is not None and self._used >= self._timeout:
                self._is_late = True
                self.end()
                return False

    def result(self) -> Run:
        """Returns the record that it left, or one of how it failed."""
        why = f"it took longer than {self._timeout or 0:g} s"
        if not self._is_late:
            record = self._folder / f"{file_name(self.policy, self.seed)}.json"
            if record.is_file():
                return Run.from_json(record)
            why = why_ended(0 if self._process is None else self._process.wait())
        return Run(self.policy, self.seed, status="failed", error=why)

    def end(self) -> None:
        """Ends the process, if it still runs."""
        if self._process is not None:
            self._signal("SIGCONT")
            end(self._process)
            self._close()

    def _start(self) -> None:
        name = file_name(self.policy, self.seed)
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        words = [str(self._folder), self.policy, str(self.seed)]
        log = self._folder / f"{name}.log"
        with uninterrupted():
            self._process, self._reading = start_with_pipe(_CHILD, words, log)

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


def in_turns(players: Iterable[RunProcess]) -> Iterator[RunProcess]:
    """Yields processes as they end; those that wait go on in a circle.

    The next one starts as soon as those before it wait and there is room for it; where
    there is none, it starts when they have ended. Who waits for the others stands back
    until all of those that have begun do.
    """
    pending = collections.deque(players)
    waiting: collections.deque[RunProcess] = collections.deque()
    try:
        while pending or waiting:
            can_start = pending and (not waiting or memory_has_room(waiting))
            player = pending.popleft() if can_start else _next(waiting)
            waiting.append(player)  # so that it is ended if it is interrupted
            if not player.go_on():
                waiting.remove(player)
                yield player
    finally:
        for player in waiting:
            player.end()


def _next(waiting: collections.deque[RunProcess]) -> RunProcess:
    """Returns the process that has waited longest and does not wait for others."""
    if all(player.has_met for player in waiting):
        for player in waiting:
            player.has_met = False
    while waiting[0].has_met:
        waiting.rotate(-1)
    return waiting.popleft()


def memory_has_room(waiting: Iterable[RunProcess]) -> bool:
    """Whether memory has room for one more process like those that wait."""
    psutil = checks.require("psutil", extra="report", purpose="`tfamp.compare`")
    sizes = [0]
    for process in waiting:
        with contextlib.suppress(psutil.Error):  # it has just ended
            sizes.append(psutil.Process(process.pid).memory_info().rss)
    return bool(psutil.virtual_memory().available >= _ROOM * max(sizes))


class Line:
    """The other end of a run's pipe: tells how far it is and waits for its turn.

    It writes to a file descriptor, None for nothing; where `answers` end, so does this
    process.
    """

    def __init__(
        self,
        descriptor: int | None = None,
        answers: IO[str] | None = None,
        *,
        takes_turns: bool = False,
    ) -> None:
        self._descriptor = descriptor
        self._answers: IO[str] = answers or sys.stdin
        self.takes_turns = takes_turns and descriptor is not None

    def tell(self, part: float) -> None:
        """Tells which part of the training is done, in [0, 1]."""
        self._write(f"{part:.4f}")

    def wait_for_turn(self) -> None:
        """Lets the others have theirs, and returns when it is this run's again.

        A SystemExit where the process that started this one is gone.
        """
        if not self.takes_turns:
            return
        self._write(_TURN)
        if not self._answers.readline():
            raise SystemExit("The comparison that this run belongs to has ended.")

    def wait_for_others(self) -> None:
        """Waits until the others have come as far, as for the timing of latencies."""
        if self.takes_turns:
            self._write(_MEETING)
            self.wait_for_turn()

    def _write(self, word: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, f"{word}\n".encode())


def end_with_parent() -> None:
    """Ends this process with the one that started it, where it is stopped as well.

    A process that waits for its turn is stopped, so it cannot see its parent go. Other
    systems than Linux have no such request, and there nothing is stopped.
    """
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
