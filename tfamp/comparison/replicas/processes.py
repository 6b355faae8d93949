"""The processes of some replicas, seen from outside: started, asked, ended together."""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tfamp.comparison.replicas.records import Kind
from tfamp.machine.clusters import Cluster
from tfamp.machine.network import free_ports
from tfamp.records.record import Record
from tfamp.trials import processes

_CHILD = "tfamp.comparison.replicas.child"
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 5.0
_GPUS = "CUDA_VISIBLE_DEVICES"
# What a launcher set for this process is not for those that it starts.
_OF_LAUNCHERS = ("TF_CONFIG", "SM_HOSTS", "SM_CURRENT_HOST", "JOB_COMPLETION_INDEX")

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ReplicaJob(Record):
    """The settings of a measurement.

    Args:
        title: What is trained.
        kind: What the replicas are: "logical CPUs" or "GPUs" of one process, or
            "workers", a process each.
        batch_size: Examples of a step on one device; None takes the data's.
        seconds: For `bottleneck`.
    """

    FILE: ClassVar[str] = "replicas.json"

    title: str
    kind: Kind
    batch_size: int | None = None
    seconds: float = 10.0


def state_file(folder: Path, replicas: int) -> Path:
    """Returns where the state after the first steps of so many replicas is kept."""
    return folder / f"state_{replicas}.npz"


def log_file(folder: Path, replicas: int, index: int) -> Path:
    """Returns where a process prints to."""
    return folder / f"replicas_{replicas}_process_{index}.log"


class Replicas:
    """Some replicas: one process with all of them, or one for each worker.

    Args:
        folder: Where the job, model and data lie.
        number: How many replicas.
        kind: What they are.
        timeout_seconds: The most that an answer may take.
        on_wait: Called while it waits.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        kind: Kind,
        *,
        timeout_seconds: float = 600.0,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.number = number
        self._folder, self._timeout, self._on_wait = folder, timeout_seconds, on_wait
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[int] = []
        self._lines: list[bytes] = []
        count = number if kind == "workers" else 1
        try:
            for index, environment in enumerate(_environments(kind, count, folder)):
                words = [str(folder), str(number), str(index)]
                log = log_file(folder, number, index)
                process, reader = processes.start_with_pipe(
                    _CHILD, words, log, variables=environment
                )
                self._processes.append(process)
                self._readers.append(reader)
                self._lines.append(b"")
        except BaseException:
            self.end()
            raise

    def ask(self, do: str, **arguments: Any) -> list[Answer]:
        """Has all processes do the same, and returns the answer of each.

        Raises:
            RuntimeError: One of them failed or ended; all are ended then.
            TimeoutError: It took too long, likewise.
        """
        order = f"{json.dumps({'do': do, **arguments})}\n".encode()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as is seen below
                if process.stdin is not None:
                    process.stdin.write(order)
                    process.stdin.flush()
        return self.answers()

    def answers(self) -> list[Answer]:
        """Returns an answer of each process, as they stand when they have begun."""
        found: dict[int, Answer] = {}
        began = time.monotonic()
        while len(found) < len(self._readers):
            waiting = [fd for i, fd in enumerate(self._readers) if i not in found]
            for reader in select.select(waiting, [], [], _POLL_SECONDS)[0]:
                index = self._readers.index(reader)
                words = os.read(reader, 65536)
                if not words:
                    status = self._processes[index].wait()
                    self._fail(index, processes.why_ended(status))
                self._lines[index] += words
                line, end, rest = self._lines[index].partition(b"\n")
                if end:
                    self._lines[index] = rest
                    found[index] = json.loads(line)
                    if "error" in found[index]:
                        self._fail(index, found[index]["error"])
            self._on_wait()
            if time.monotonic() - began > self._timeout:
                self.end()
                raise TimeoutError(
                    f"A process of {self.number} replicas took more than "
                    f"{self._timeout:g} s for an answer; expected less. Pass a larger "
                    "`timeout_seconds`, or a smaller batch."
                )
        return [found[index] for index in range(len(self._readers))]

    def end(self) -> None:
        """Ends all processes, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            processes.close_input(process)
        for reader in self._readers:
            os.close(reader)
        self._processes, self._readers = [], []

    def _fail(self, index: int, why: str) -> NoReturn:
        """Ends all and raises; where another one failed first, it tells of that."""
        for other, process in enumerate(self._processes):
            if other == index:
                continue
            # Those that lose a worker say so in the place of what ended it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_PATIENCE_SECONDS)
                if status < 0:
                    index, why = other, processes.why_ended(status)
        log = processes.tail(log_file(self._folder, self.number, index))
        who = f"Process {index} of {self.number} replicas"
        if self.number == 1:
            who = "The process of one device"
        self.end()
        raise RuntimeError(
            f"{who} failed: {why.rstrip('.')}. Expected `build` and its data to train "
            f"there; mend what its log ends with:\n{log}"
        )


def _environments(
    kind: Kind, count: int, folder: Path
) -> Sequence[dict[str, str | None]]:
    """Returns what differs in the environment of each process; None takes it away."""
    of_slurm = [name for name in os.environ if name.startswith("SLURM_")]
    base: dict[str, str | None] = dict.fromkeys((*_OF_LAUNCHERS, *of_slurm))
    # TensorFlow deletes its files of traced code at its end, which a kill prevents.
    base["TMPDIR"] = str(folder)
    if kind != "workers" or count == 1:
        return [base]
    workers = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    given = os.environ.get(_GPUS, "")
    gpus = given.split(",") if given else [str(index) for index in range(count)]
    return [
        {
            **base,
            "TF_CONFIG": json.dumps(
                Cluster("TF_CONFIG", workers, index=index).to_tf_config()
            ),
            _GPUS: gpus[index] if index < len(gpus) else "-1",
        }
        for index in range(count)
    ]
