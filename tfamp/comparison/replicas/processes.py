"""The processes of some replicas: started, asked and ended together, from both ends.

`python -m tfamp.comparison.replicas.processes FOLDER REPLICAS INDEX DESCRIPTOR` is such
a process. It builds the model and then does what lines of JSON on its standard input
ask for, each with one line of answer to the descriptor. It ends where its input does.
"""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import tensorflow as tf

import tfamp
from tfamp.comparison.replicas.judgement import MODES, Kind, size_of
from tfamp.comparison.replicas.steps import Step, make_steps
from tfamp.keras_hooks import structure, trainer
from tfamp.machine import devices
from tfamp.machine.clusters import Cluster
from tfamp.machine.hosts import free_ports
from tfamp.memory.batch_search.processes import Batch, Settings, batch_of
from tfamp.records.checks import short_error
from tfamp.records.record import Record
from tfamp.stepping.arguments import build
from tfamp.stepping.input_waits import bottleneck
from tfamp.stepping.snapshots import num_local_replicas
from tfamp.stepping.unchanged import unchanged
from tfamp.trials import child, processes
from tfamp.trials.processes import end_with_parent
from tfamp.trials.storage import Job

_CHILD = "tfamp.comparison.replicas.processes"
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 5.0
_GPUS = "CUDA_VISIBLE_DEVICES"
# What a launcher set for this process is not for those that it starts.
_OF_LAUNCHERS = ("TF_CONFIG", "SM_HOSTS", "SM_CURRENT_HOST", "JOB_COMPLETION_INDEX")

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ReplicaJob(Record):
    """The settings of a measurement, as a file that its processes read.

    `title` is what is trained, `batch_size` the examples of a step on one device, None
    for the data's; `seconds` are for `bottleneck`.
    """

    FILE: ClassVar[str] = "replicas.json"

    title: str
    kind: Kind
    batch_size: int | None = None
    seconds: float = 10.0


def log_file(folder: Path, replicas: int, index: int) -> Path:
    """Returns where a process prints to."""
    return folder / f"replicas_{replicas}_process_{index}.log"


class Replicas:
    """Some replicas: one process with all of them, or one for each worker.

    An answer may take `timeout_seconds`; while it waits, `on_wait` is called.
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

        A RuntimeError where one of them failed or ended, a TimeoutError where it took
        too long; all are ended then.
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


def main(argv: Sequence[str]) -> int:
    """Does what it is asked for until its input ends; 1 if something failed."""
    end_with_parent()
    folder, replicas, descriptor = Path(argv[0]), int(argv[1]), int(argv[3])

    def tell(answer: Answer) -> None:
        os.write(descriptor, f"{json.dumps(answer)}\n".encode())

    try:
        with contextlib.ExitStack() as stack:
            asked = _Replicas(folder, replicas, stack)
            tell(asked.facts())
            for line in sys.stdin:
                order = json.loads(line)
                tell(getattr(asked, order.pop("do"))(**order))
    except Exception as error:
        # The whole of it goes to the log.
        traceback.print_exc()
        tell({"error": short_error(error)})
        return 1
    return 0


class _Replicas:
    """A model on some replicas, and what can be asked about it."""

    def __init__(
        self, folder: Path, replicas: int, stack: contextlib.ExitStack
    ) -> None:
        self._folder, self._num = folder, replicas
        self._job = ReplicaJob.from_json(folder / ReplicaJob.FILE)
        self._stack = stack
        settings = Settings.read(folder)
        strategy = _prepare(settings, self._job.kind, replicas)
        stack.enter_context(settings.in_force())
        if strategy is not None:
            stack.enter_context(strategy.scope())
        job = Job(self._job.title, (settings.policy,), (0,), epochs=1)
        self._model, self._data, _ = child.build(folder, job, settings.variant, 0)
        if replicas > 1 and self._model.distribute_strategy is not strategy:
            raise ValueError(
                "`build_model` made the model under a strategy of its own; expected "
                "none, since it is built for one device and for several. Leave the "
                "strategy out: the scope is open where `build_model` is called."
            )
        self._batch: Batch = batch_of(self._data)
        # Metrics too: variables made in a step give it two traces.
        trainer.build_from(self._model, self._batch.parts)
        build(self._model, self._batch.parts)
        self._size = self._job.batch_size or self._batch.size
        self._steps: dict[str, Step] = {}

    def facts(self) -> Answer:
        """Returns what the process is, once it stands."""
        computing = [d for d in devices.devices() if d.kind != "cpu"]
        return {
            "model": self._model.name,
            "policy": self._model.dtype_policy.name,
            "batch_size": self._size,
            "devices": [d.name for d in computing or devices.devices()],
            "compute_dtypes": sorted(
                {layer.compute_dtype for _, layer, _ in structure.walk(self._model)}
            ),
            "tf32": bool(computing)
            and bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        }

    def gates(self) -> Answer:
        """Returns what one device says: dtypes of products, and waits for the input."""
        proof = tfamp.prove(self._model, self._data, batch_size=self._size)
        waits = bottleneck(
            self._model,
            self._data,
            seconds=self._job.seconds,
            batch_size=self._size,
        )
        return {
            "half_share": proof.half_share_of_flops,
            "causes": [f"{each.message} {each.remedy}" for each in proof.causes[:2]],
            "bottleneck": waits.to_dict(),
        }

    def first_steps(self, steps: int | None) -> Answer:
        """Makes the first steps on the batch of one device, and keeps what they left.

        None makes as many as it takes until two have been applied.
        """
        made, notes, random = make_steps(
            self._model,
            self._batch.parts,
            self._size,
            folder=self._folder,
            replicas=self._num,
            steps=steps,
        )
        return {"steps": made, "notes": notes, "random": random}

    def trace(self) -> Answer:
        """Traces all steps and runs them until they are warm."""
        # Rates of 0 from here on, so that numbers stay what they are in training.
        self._stack.enter_context(unchanged(self._model))
        seconds = {}
        for mode in MODES[: 1 if self._num == 1 else None]:
            size = size_of(mode, self._size, self._num)
            for reduces in (False, True)[self._num == 1 :]:
                name = mode if reduces else f"{mode} alone"
                self._steps[name] = Step(
                    self._model, self._batch.parts, size, reduces=reduces
                )
                seconds[name] = self._steps[name].warm()
        sizes = self._steps["strong"].sizes
        known = [size for size in sizes if size is not None]
        total = sum(known) // num_local_replicas(self._model)
        is_known = len(known) == len(sizes) and self._num > 1
        return {"seconds": seconds, "reduced_bytes": total if is_known else None}

    def time(self, step: str, number: int) -> Answer:
        """Returns the seconds of one of some steps."""
        return {"seconds": self._steps[step].run(number) / number}


def _prepare(settings: Settings, kind: str, replicas: int) -> Any:
    """Gives this process its devices; returns the strategy, None for one replica."""
    num_cpus = replicas if kind == "logical CPUs" and replicas > 1 else 0
    dataclasses.replace(settings, num_cpus=num_cpus).prepare_devices()
    for gpu in tf.config.get_visible_devices("GPU"):
        # The processes of other numbers of replicas stand beside this one.
        tf.config.experimental.set_memory_growth(gpu, True)
    if replicas == 1:
        return None
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()  # as TF_CONFIG says
    what = "GPU" if kind == "GPUs" else "CPU"
    return tf.distribute.MirroredStrategy([f"{what}:{i}" for i in range(replicas)])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
