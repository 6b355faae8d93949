"""The process of one run: `python -m tfamp.trials.child FOLDER POLICY SEED`.

A fourth argument is the descriptor of a pipe, where it tells how far it is. It leaves a
record of the run, or of the error that ended it. Then the process of a first seed
begins anew, with "memory" as its fifth argument, and adds the memory of a few calls and
steps: no data are there, and nothing that went before has left memory that they would
hide in.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import functools
import gc
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.machine import memory as process_memory
from tfamp.plan import read_plan
from tfamp.records import checks, versions
from tfamp.records.checks import short_error
from tfamp.records.versions import VARIABLES
from tfamp.stepping.arguments import arrays_of, dataset_of, first_batch
from tfamp.trials import measurements, parcel, training
from tfamp.trials.processes import Line, end_with_parent
from tfamp.trials.run_records import Context, LayerDtype, Memory, Run
from tfamp.trials.storage import (
    CONTEXT_FILE,
    FILE,
    Job,
    file_name,
    model_of,
)
from tfamp.trials.training import train
from tfamp.trials.variant import Variant, in_force

_MEMORY = "memory"
# Batches that are kept for its steps, and steps.
_MEMORY_BATCHES, _MEMORY_STEPS = 2, 4


def _context(command: str) -> Context:
    """Returns the machine, versions and settings of this process."""
    threading = tf.config.threading
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower()
    return Context(
        devices=devices.devices(),
        driver=_driver(),
        versions={"tfamp": tfamp.__version__, **versions.installed_versions()},
        system=f"{platform.platform()}, Python {platform.python_version()}",
        # Those that this process may use.
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        intra_op_threads=threading.get_intra_op_parallelism_threads(),
        inter_op_threads=threading.get_inter_op_parallelism_threads(),
        tf32=bool(tf.config.experimental.tensor_float_32_execution_enabled()),
        onednn=onednn not in ("0", "false"),
        variables={k: os.environ[k] for k in VARIABLES if k in os.environ},
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _driver() -> str:
    """Returns the version of NVIDIA's driver, "" without one."""
    try:
        pynvml: Any = checks.require("pynvml", extra="gpu", purpose="The driver")
    except ImportError:
        return ""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    return ""


def main(argv: Sequence[str]) -> int:
    """Runs once and returns 0, or 1 if it failed."""
    folder, policy, seed = Path(argv[0]), argv[1], int(argv[2])
    line = Line(int(argv[3]) if len(argv) > 3 else None)
    job = Job.from_json(folder / FILE)
    record = folder / f"{file_name(policy, seed)}.json"
    try:
        run = measure(folder, job, policy, seed, line=line)
    except Exception as error:
        # The whole of it goes to the log; the record has what it comes to.
        traceback.print_exc()
        Run(policy, seed, status="failed", error=short_error(error)).to_json(record)
        return 1
    run.to_json(record)
    if len(argv) > 3 and seed == job.seeds[0]:
        sys.stdout.flush()
        words = [sys.executable, "-m", "tfamp.trials.child", *argv[:4], _MEMORY]
        # What is in memory goes with this program; the pipe and the number stay.
        os.execv(sys.executable, words)
    return 0


def add_memory(folder: Path, policy: str, seed: int) -> int:
    """Adds the memory of calls and steps in this fresh process to a run's record."""
    job, variant = Job.from_json(folder / FILE), Variant.parse(policy)
    record = folder / f"{file_name(policy, seed)}.json"
    run = Run.from_json(record)
    try:
        with in_force(variant):
            memory = _memory(folder, job, variant, run)
    except Exception as error:
        traceback.print_exc()
        why = f"The memory of the model is not known: {short_error(error)}"
        run = dataclasses.replace(run, notes=(*run.notes, why))
    else:
        run = dataclasses.replace(run, memory=memory)
    finally:
        shutil.rmtree(_batches_of(folder, policy, seed), ignore_errors=True)
    run.to_json(record)
    return 0


def _memory(folder: Path, job: Job, variant: Variant, run: Run) -> Memory | None:
    """Returns what the run measured of memory, with that of calls and of steps."""
    if run.memory is None:
        return None
    keras.utils.set_random_seed(run.seed)
    # Not the data, which go at once.
    model = _built(parcel.unpack(folder)[0], job, variant, run.seed)[0]
    batches = tf.data.Dataset.load(str(_batches_of(folder, run.policy, run.seed)))
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch(batches))
    _give_back_memory()
    # Weights that are there already count as the model's.
    start_bytes = max(
        process_memory.process_bytes() - structure.bytes_of(model.variables), 0
    )
    can_reset = process_memory.reset_peak()
    function = tf.function(
        lambda x: model(x, training=False), jit_compile=variant.jit_compile
    )
    for size in sorted({1, *job.latency_batch_sizes, run.batch_size}):
        rows = functools.partial(training.rows, size=size)
        tf.nest.map_structure(np.asarray, function(tf.nest.map_structure(rows, inputs)))
    inference_bytes = process_memory.peak_process_bytes() if can_reset else None
    model.fit(batches.repeat(), steps_per_epoch=_MEMORY_STEPS, epochs=1, verbose=0)
    return dataclasses.replace(
        run.memory,
        start_bytes=start_bytes,
        # Kernels count both to some pages only, and a small model needs few more.
        training_bytes=max(start_bytes, process_memory.peak_process_bytes()),
        inference_bytes=inference_bytes,
    )


def _batches_of(folder: Path, policy: str, seed: int) -> Path:
    """Returns where the first batches of a run are kept for its memory."""
    return folder / f"{file_name(policy, seed)}.batches"


def _keep_batches(data: Any, job: Job, path: Path) -> None:
    """Writes the first batches of what `fit` takes."""
    dataset = dataset_of(data, job.batch_size or 32, needs_targets=False)
    dataset.take(_MEMORY_BATCHES).save(str(path))


def _give_back_memory() -> None:
    """Gives the system what is free in this process, or steps would hide in it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def measure(
    folder: Path, job: Job, policy: str, seed: int, *, line: Line | None = None
) -> Run:
    """Trains one model and returns what it measured."""
    variant = Variant.parse(policy)
    with in_force(variant) as (resolved, reason):
        run = _measure(folder, job, variant, Run(policy, seed), line=line)
    plan = read_plan(variant.policy) if variant.is_plan else None
    if plan is not None and plan.jit_compile:
        resolved = f"{resolved}+xla"
    return dataclasses.replace(run, resolved_policy=resolved, reason=reason)


def _measure(
    folder: Path, job: Job, variant: Variant, run: Run, *, line: Line | None
) -> Run:
    """Returns the run with what it measured under what is in force."""
    policy, seed = run.policy, run.seed
    if not (folder / CONTEXT_FILE).exists():
        _context(job.command).to_json(folder / CONTEXT_FILE)
    process_memory.reset_device_peak()
    started = time.perf_counter()
    model, train_data, validation = build(folder, job, variant, seed)
    build_seconds = time.perf_counter() - started
    trained = train(model, train_data, validation, job=job, run=run, line=line)
    run = trained.run
    memory = Memory(
        start_bytes=process_memory.process_bytes(),
        device_bytes=process_memory.device_peak_bytes(),
        device_used_bytes=trained.device_used_bytes,
    )
    notes = list(run.notes)
    num_examples = run.num_examples if validation is None else 0
    if validation is not None:
        with _noted("The metric of single examples is not known", notes):
            examples = measurements.measure_examples(
                model, validation, run.final_metrics, batch_size=job.batch_size
            )
            examples.write(folder, policy, seed)
            num_examples = examples.number
    latencies, why = training.latencies(
        model,
        trained.inputs,
        sizes=sorted({*job.latency_batch_sizes, run.batch_size}),
        jit_compile=variant.jit_compile,
    )
    notes += why
    is_first = seed == job.seeds[0]
    if is_first:
        with _noted("The memory of the model is not known", notes):
            _keep_batches(train_data, job, _batches_of(folder, policy, seed))
    file_bytes, path = None, model_of(folder, policy, seed)
    with _noted("The model cannot be saved", notes):
        model.save(path)
        file_bytes = path.stat().st_size
    path.unlink(missing_ok=True)
    return dataclasses.replace(
        run,
        num_parameters=model.count_params(),
        build_seconds=build_seconds,
        num_examples=num_examples,
        num_nonfinite_weights=num_nonfinite(model),
        latencies=latencies,
        memory=memory,
        file_bytes=file_bytes,
        layers=layers_of(model),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _noted(what: str, notes: list[str]) -> Iterator[None]:
    """Notes why something is not known: the run itself is done, and not lost for that.

    Models, data and metrics of the user's own fail in their own ways.
    """
    try:
        yield
    except Exception as error:
        notes.append(f"{what}: {short_error(error)}")


def build(
    folder: Path, job: Job, variant: Variant, seed: int
) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model and its data, made anew from a seed."""
    keras.utils.set_random_seed(seed)
    build_model, train_data, validation = parcel.unpack(folder)
    model, *own = _built(build_model, job, variant, seed)
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
    values = [
        parcel.call(value, seed=seed, epochs=job.epochs) if callable(value) else value
        for value in (train_data, validation)
    ]
    return model, _as_fit_takes_it(values[0]), _as_fit_takes_it(values[1])


def _built(build_model: Any, job: Job, variant: Variant, seed: int) -> tuple[Any, ...]:
    """Returns the compiled model, and what data the function returned with it."""
    built = parcel.call(build_model, seed=seed, epochs=job.epochs)
    parts = parcel.parts(built, of="`build_model`", compiled=True)
    if variant.jit_compile:
        parts[0].jit_compile = True
    return parts


def layers_of(model: keras.Model) -> tuple[LayerDtype, ...]:
    """Returns the dtypes of each layer, managed by tfamp or not."""
    names = [field.name for field in dataclasses.fields(LayerDtype)]
    rows = tfamp.assignment(model)
    return tuple(LayerDtype(*(getattr(row, name) for name in names)) for row in rows)


def num_nonfinite(model: keras.Model) -> int:
    """Returns how many weights are NaN or inf."""
    arrays = [np.asarray(weight, np.float32) for weight in model.get_weights()]
    return int(sum(array.size - np.isfinite(array).sum() for array in arrays))


def _as_fit_takes_it(data: Any) -> Any:
    """Returns arrays as a tuple, a `PyDataset` as it is, all else as a dataset."""
    if data is None or isinstance(data, keras.utils.PyDataset):
        return data
    arrays = arrays_of(data, needs_targets=False)
    return dataset_of(data) if arrays is None else arrays


if __name__ == "__main__":
    end_with_parent()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.argv[5:] == [_MEMORY]:
        sys.exit(add_memory(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
    sys.exit(main(sys.argv[1:]))
