"""A process of some replicas: `python -m tfamp.comparison.replicas.child FOLDER ...`.

FOLDER REPLICAS INDEX DESCRIPTOR. It builds the model and then does what lines of JSON
on its standard input ask for, each with one line of answer to the descriptor. It ends
where its input does.
"""

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import tfamp
from tfamp.comparison.replicas import first_steps
from tfamp.comparison.replicas.processes import Answer, ReplicaJob
from tfamp.comparison.replicas.records import MODES, size_of
from tfamp.comparison.replicas.steps import Step
from tfamp.keras_hooks import structure, trainer
from tfamp.machine import devices
from tfamp.memory.batch_search.settings import Batch, Settings, batch_of
from tfamp.records.checks import short_error
from tfamp.stepping.arguments import build
from tfamp.stepping.input_waits.measure import bottleneck
from tfamp.stepping.snapshots.state import num_local_replicas
from tfamp.stepping.unchanged import unchanged
from tfamp.trials import child
from tfamp.trials.processes import end_with_parent
from tfamp.trials.storage import Job


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
        made, notes, random = first_steps.make(
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
        payload = self._steps["strong"].payload
        per_replica = num_local_replicas(self._model)
        is_known = payload.is_known and self._num > 1
        return {
            "seconds": seconds,
            "reduced_bytes": payload.num_bytes // per_replica if is_known else None,
        }

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
