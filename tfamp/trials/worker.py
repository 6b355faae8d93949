"""The process of one trial: `python -m tfamp.trials.worker FOLDER TASK PIPE`.

It builds a model from a seed and trains it whole, or a few steps of one batch size, and
leaves a `Run`, of whatever came of it. It ends itself when the process that started it
is gone, or when it holds more memory than it may.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import errno
import gc
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.machine import memory as process_memory
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.plan import read_plan
from tfamp.records import versions
from tfamp.records.checks import short_error
from tfamp.trials import examples, parcel, tasks, training
from tfamp.trials.batches import as_fit_takes_it, batch_of
from tfamp.trials.processes import end_with_parent
from tfamp.trials.run_records import Context, LayerDtype, Memory, Run
from tfamp.trials.tasks import Facts, Task
from tfamp.trials.variant import Variant, in_force

_LOOK_SECONDS = 0.02
Tell = Callable[[float], None]


def main(argv: Sequence[str]) -> int:
    """Does a task and leaves a record; returns 0, or 1 if it failed."""
    folder, task = Path(argv[0]), Task.from_json(argv[1])
    pipe = int(argv[2]) if len(argv) > 2 else None

    def tell(part: float) -> None:
        if pipe is not None:
            os.write(pipe, f"{part:.4f}\n".encode())

    record, over = folder / f"{task.name}.json", threading.Event()
    tell(0.0)
    try:
        _limit_memory(record, task, over)
        variant = Variant.parse(task.policy)
        with in_force(variant) as (resolved, reason):
            plan = read_plan(variant.policy) if variant.is_plan else None
            if plan is not None and plan.jit_compile:
                resolved += "+xla"
            run = Run(task.policy, task.seed, resolved_policy=resolved, reason=reason)
            process_memory.reset_device_peak()
            measure = _few_steps if task.steps else _whole
            run = measure(folder, task, variant, run, tell)
    except Exception as error:
        # The whole of it goes to the log; the record has what it comes to.
        traceback.print_exc()
        is_memory = is_for_want_of_memory(error)
        why, outcome = short_error(error), "out of memory" if is_memory else ""
        run = Run(task.policy, task.seed, "failed", why, outcome=outcome)
    over.set()
    run.to_json(record)
    return 0 if run.is_finished else 1


def is_for_want_of_memory(error: BaseException | None) -> bool:
    """States whether an error, or what it came from, says that memory is short."""
    while error is not None:
        is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if isinstance(error, MemoryError) or is_refused or is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


def _limit_memory(record: Path, task: Task, over: threading.Event) -> None:
    """Ends this process as soon as it holds more than it may; a GPU gets its limit.

    The system's way to say that memory is short may hit another program.
    """
    limit = task.allowed_bytes
    gpus = tf.config.get_visible_devices("GPU")
    if limit is None:
        return
    part = tf.config.LogicalDeviceConfiguration(limit // 2**20)
    for gpu in gpus:
        tf.config.set_logical_device_configuration(gpu, [part])

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            held = process_memory.process_bytes()
            if held > limit:
                run = Run(task.policy, task.seed, "failed", outcome="over the limit")
                memory = Memory(0, training_bytes=held)
                dataclasses.replace(run, memory=memory).to_json(record)
                os._exit(1)

    if not gpus:
        threading.Thread(target=look, daemon=True).start()


def _whole(folder: Path, task: Task, variant: Variant, run: Run, tell: Tell) -> Run:
    """Trains one model whole and returns what that measured."""
    if not (folder / tasks.CONTEXT).exists():
        _context(task.command).to_json(folder / tasks.CONTEXT)
    model, data, validation = build(folder, task, variant)
    run, inputs = training.train(
        *(model, data, validation),
        run=run,
        epochs=task.epochs,
        batch_size=task.batch_size,
        tell=tell,
    )
    device = process_memory.device_peak_bytes()
    notes, num_examples = list(run.notes), run.num_examples
    if validation is not None:
        size, num_examples = task.batch_size or 32, 0
        try:
            num_examples = examples.write_examples(
                folder / task.name, model, validation, run.final_metrics, size
            )
        except Exception as error:  # of data and metrics of the user's own
            why = short_error(error)
            notes.append(f"The metric of single examples is not known: {why}")
    latencies, why_not = training.latencies(
        model,
        inputs,
        sizes=sorted({*task.latency_batch_sizes, run.batch_size}),
        jit_compile=variant.jit_compile,
    )
    weights = [np.asarray(weight, np.float32) for weight in model.get_weights()]
    rows = [(row.path, row.compute_dtype) for row in tfamp.assignment(model)]
    return dataclasses.replace(
        run,
        num_parameters=model.count_params(),
        num_examples=num_examples,
        num_nonfinite_weights=int(sum((~np.isfinite(w)).sum() for w in weights)),
        latencies=latencies,
        memory=Memory(process_memory.process_bytes(), device_bytes=device),
        layers=tuple(LayerDtype(*row) for row in rows),
        notes=(*notes, *why_not),
    )


def _few_steps(folder: Path, task: Task, variant: Variant, run: Run, tell: Tell) -> Run:
    """Trains some steps of one batch size, and returns their times and memory."""
    model, data, _ = build(folder, task, variant)
    batch, size = batch_of(data), task.batch_size or 1
    replicas = model.distribute_strategy.num_replicas_in_sync
    known = task.num_examples if task.data_batch_size else batch.num_examples
    facts = Facts(replicas, known, model.name)
    size = size if task.is_fresh else facts.possible(size)
    data_batch_size = task.data_batch_size or batch.size
    dataclasses.replace(
        facts, batch_size=size, data_batch_size=data_batch_size
    ).to_json(folder / f"{task.name}.facts")
    start, held = 0, []
    if task.is_fresh:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        # Weights that are there already count as the model's.
        weights = structure.bytes_of(model.variables)
        start = max(process_memory.process_bytes() - weights, 0)
        process_memory.reset_peak()
    elif size < (task.target_batch_size or 0):
        # An optimizer that adds up holds one more copy of the trainable weights.
        with model.distribute_strategy.scope():
            held = [tf.Variable(tf.zeros_like(w)) for w in model.trainable_weights]
    run = training.train_steps(model, batch.parts, run=run, size=size, steps=task.steps)
    del held
    device = process_memory.device_peak_bytes()
    peak = process_memory.peak_process_bytes()
    # Kernels count both to some pages only, and a small model needs few more.
    memory = Memory(start, max(start, peak), device)
    is_over = task.allowed_bytes is not None and (device or peak) > task.allowed_bytes
    outcome = "over the limit" if is_over else "fits"
    return dataclasses.replace(run, memory=memory, outcome=outcome)


def build(folder: Path, task: Task, variant: Variant) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model and its data, made anew from a seed."""
    keras.utils.set_random_seed(task.seed)
    build_model, train_data, validation = parcel.unpack(folder)
    how = {"seed": task.seed, "epochs": task.epochs}
    built = parcel.call(build_model, **how)
    model, *own = parcel.parts(built, of="`build_model`", compiled=True)
    if variant.jit_compile:
        model.jit_compile = True
    if train_data is None:
        train_data, validation = own
    elif any(part is not None for part in own):
        raise ValueError(
            "`build_model` returned data, and `train` was passed too; expected one of "
            "them. Return the model alone, or pass no data."
        )
    if train_data is None:
        raise ValueError(
            "There is no training data; expected `train`, or a `build_model` that "
            "returns (model, train, validation). Pass one of them."
        )
    made = [
        parcel.call(each, **how) if callable(each) else each
        for each in (train_data, validation)
    ]
    return model, as_fit_takes_it(made[0]), as_fit_takes_it(made[1])


def _context(command: str) -> Context:
    """Returns the machine and the versions of this process."""
    return Context(
        devices=devices.devices(),
        versions={"tfamp": tfamp.__version__, **versions.installed_versions()},
        system=f"{platform.platform()}, Python {platform.python_version()}",
        num_cores=os.cpu_count() or 1,
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


if __name__ == "__main__":
    end_with_parent()
    # Where memory runs out, the kernel takes this process and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
