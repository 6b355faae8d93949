"""The workers of a data service: processes started here, or addresses elsewhere."""

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from tfamp import _units
from tfamp.data import service_worker

# By path: `-m` would import the package, and Keras with it, in every worker.
_RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_STOP_SECONDS = 5.0
_LAST_CHARACTERS = 1000
_CONNECT_SECONDS = 3.0


class ServiceError(RuntimeError):
    """A worker of a data service did not start, died, or says nothing any more.

    Inside `fit` it arrives as `tf.errors.UnknownError` with the same text.
    """


class Worker(Protocol):
    """What a service knows of one worker."""

    address: str

    def problem(self) -> str | None:
        """Returns why no more elements will come, None while they may."""

    def stop(self) -> None:
        """Lets go of the worker."""


class LocalWorker:
    """A worker process on this machine, which ends when this process does.

    Args:
        command: What to run; None for the worker program.
        clock: Seconds, for the limit on the start.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        self._clock = clock
        self._stderr = tempfile.TemporaryFile()
        path = str(Path(service_worker.__file__))
        own = [sys.executable, "-c", _RUN, path, f"--parent={os.getpid()}"]
        self._process = subprocess.Popen(
            command or own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Reading and decoding use no accelerator, and would take its memory.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def wait_until_ready(self, deadline: float) -> None:
        """Waits for the address that the worker prints once it serves.

        Raises:
            ServiceError: It ended, or the clock passed `deadline`.
        """
        line = ""
        while not line.startswith(service_worker.READY):
            left = deadline - self._clock()
            try:
                line = self._lines.get(timeout=max(0.0, min(1.0, left)))
            except queue.Empty:
                line = ""
            if line == "" and (self._process.poll() is not None or left <= 0):
                how = self.problem() or "is not ready in time"
                raise ServiceError(
                    f"Worker process {self.pid} {how}; expected it to serve on "
                    f"loopback.{self._last_words()} Check that TensorFlow starts in a "
                    "process of its own here, or raise `start_seconds`."
                )
        self.address = line.removeprefix(service_worker.READY).strip()

    def problem(self) -> str | None:
        """Returns how the process ended, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def stop(self) -> None:
        """Ends the process; twice does no harm."""
        process = self._process
        if process.poll() is None:
            process.kill()
            process.wait(_STOP_SECONDS)
        for stream in (process.stdin, process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    def answer(self) -> Any:
        """Answers in the place of a dead worker that it knows nothing.

        TensorFlow's client asks a dead worker again for an hour, in a thread that
        nothing else ends, and logs each time.

        Returns:
            A server to hold as long as is needed, None where the port is taken.
        """
        port = int(self.address.rpartition(":")[2] or 0)
        service = tf.data.experimental.service
        try:
            return service.DispatchServer(service.DispatcherConfig(port=port))
        except (RuntimeError, tf.errors.OpError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} at {self.address}"

    def _listen(self) -> None:
        """Hands on the lines of the worker's output, and its end as an empty one."""
        try:
            for line in self._process.stdout or ():
                self._lines.put(line)
        except ValueError:  # closed meanwhile
            return
        self._lines.put("")

    def _last_words(self) -> str:
        """Returns the end of what the worker wrote to its error output."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return f" It wrote last: {text[-_LAST_CHARACTERS:]!r}." if text else ""


def _connect(address: str) -> None:
    """Opens a connection to "host:port" and closes it."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


class RemoteWorker:
    """A worker that runs already, on this machine or another.

    Args:
        address: Its "host:port".
        connect: Raises `OSError` where nobody answers at an address.
    """

    def __init__(self, address: str, connect: Callable[[str], None] = _connect) -> None:
        self.address = address
        self._connect = connect

    def problem(self) -> str | None:
        """Returns why the address cannot be reached, None where it can."""
        try:
            self._connect(self.address)
        except OSError as error:
            within = _units.format_seconds(_CONNECT_SECONDS)
            return f"does not answer within {within} ({error})"
        return None

    def stop(self) -> None:
        """Leaves the worker running: others may use it."""

    def __str__(self) -> str:
        return self.address
