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
import functools
import gc
import os
import platform
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
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
from tfamp.records import checks, versions
from tfamp.records.checks import short_error
from tfamp.records.versions import VARIABLES
from tfamp.stepping.arguments import dataset_of
from tfamp.trials import examples, parcel, tasks, training
from tfamp.trials.batches import as_fit_takes_it, batch_of, rows
from tfamp.trials.processes import end_with_parent
from tfamp.trials.run_records import Context, LayerDtype, Memory, Run
from tfamp.trials.tasks import Facts, Task
from tfamp.trials.variant import Variant, in_force

_OWN_SCORE = Path("/proc/self/oom_score_adj")
_LOOK_SECONDS = 0.02
# Batches that a whole training leaves for a few steps.
_KEPT_BATCHES = 2
_XLA = re.compile(r"\bxla|hlo|while trying to allocate", re.IGNORECASE)


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
        with _in_force(task) as (variant, resolved, reason):
            _watch(record, task, over)
            run = Run(task.policy, task.seed, resolved_policy=resolved, reason=reason)
            measure = _few_steps if task.steps else _whole
            run = measure(folder, task, variant, run, tell)
    except Exception as error:
        # The whole of it goes to the log; the record has what it comes to.
        traceback.print_exc()
        run = Run(
            *(task.policy, task.seed, "failed", short_error(error)),
            outcome=outcome_of(error) or "",
        )
    over.set()
    run.to_json(record)
    return 0 if run.is_finished else 1


def outcome_of(error: BaseException) -> str | None:
    """Returns how what raised this ended, None if not for want of memory."""
    seen: BaseException | None = error
    while seen is not None:
        is_refused = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        if isinstance(seen, MemoryError) or is_refused:
            return "MemoryError"
        if is_out_of_memory(seen):
            if _XLA.search(str(seen)):
                return "XLA out of memory"
            is_exhausted = isinstance(seen, tf.errors.ResourceExhaustedError)
            return "ResourceExhaustedError" if is_exhausted else "out of memory"
        seen = seen.__cause__
    return None


@contextlib.contextmanager
def _in_force(task: Task) -> Iterator[tuple[Variant, str, str]]:
    """Puts the policy in force; yields it, its name and why. A GPU gets its limit."""
    if task.allowed_bytes is not None:
        part = tf.config.LogicalDeviceConfiguration(task.allowed_bytes // 2**20)
        for gpu in tf.config.get_visible_devices("GPU"):
            tf.config.set_logical_device_configuration(gpu, [part])
    variant = Variant.parse(task.policy)
    with in_force(variant) as (resolved, reason):
        plan = read_plan(variant.policy) if variant.is_plan else None
        if plan is not None and plan.jit_compile:
            resolved = f"{resolved}+xla"
        yield variant, resolved, reason


def _watch(record: Path, task: Task, over: threading.Event) -> None:
    """Ends this process as soon as it holds more than it may; a GPU has its own limit.

    The system's way to say that memory is short may hit another program.
    """
    limit = task.allowed_bytes
    if limit is None or tf.config.get_visible_devices("GPU"):
        return

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            held = process_memory.process_bytes()
            if held > limit:
                Run(
                    *(task.policy, task.seed, "failed"),
                    outcome="over the limit",
                    memory=Memory(0, training_bytes=held),
                ).to_json(record)
                os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _whole(
    folder: Path, task: Task, variant: Variant, run: Run, tell: Callable[[float], None]
) -> Run:
    """Trains one model whole and returns what that measured."""
    if not (folder / tasks.CONTEXT).exists():
        _context(task.command).to_json(folder / tasks.CONTEXT)
    process_memory.reset_device_peak()
    model, data, validation = build(folder, task, variant)
    run, inputs = training.train(
        *(model, data, validation),
        run=run,
        epochs=task.epochs,
        batch_size=task.batch_size,
        tell=tell,
    )
    memory = Memory(
        start_bytes=process_memory.process_bytes(),
        device_bytes=process_memory.device_peak_bytes(),
    )
    size, notes, num_examples = task.batch_size or 32, list(run.notes), run.num_examples
    if validation is not None:
        num_examples = 0
        with _noted("The metric of single examples is not known", notes):
            num_examples = examples.write_examples(
                folder / task.name, model, validation, run.final_metrics, size
            )
    latencies, why = training.latencies(
        model,
        inputs,
        sizes=sorted({*task.latency_batch_sizes, run.batch_size}),
        jit_compile=variant.jit_compile,
    )
    notes += why
    if task.keeps_batches:
        with _noted("The memory of the model is not known", notes):
            dataset = dataset_of(data, size, needs_targets=False)
            dataset.take(_KEPT_BATCHES).save(str(_batches_of(folder, task)))
    file_bytes, path = None, folder / f"{task.name}.keras"
    with _noted("The model cannot be saved", notes):
        model.save(path)
        file_bytes = path.stat().st_size
    path.unlink(missing_ok=True)
    weights = [np.asarray(weight, np.float32) for weight in model.get_weights()]
    names = [field.name for field in dataclasses.fields(LayerDtype)]
    return dataclasses.replace(
        run,
        num_parameters=model.count_params(),
        num_examples=num_examples,
        num_nonfinite_weights=int(sum((~np.isfinite(w)).sum() for w in weights)),
        latencies=latencies,
        memory=memory,
        file_bytes=file_bytes,
        layers=tuple(
            LayerDtype(*(getattr(row, name) for name in names))
            for row in tfamp.assignment(model)
        ),
        notes=tuple(notes),
    )


def _few_steps(
    folder: Path, task: Task, variant: Variant, run: Run, tell: Callable[[float], None]
) -> Run:
    """Trains some steps of one batch size, and returns their times and memory."""
    process_memory.reset_device_peak()
    kept = _batches_of(folder, task)
    if kept.is_dir():
        keras.utils.set_random_seed(task.seed)
        # Not the data, which go at once.
        model = _built(parcel.unpack(folder)[0], task, variant)[0]
        data: Any = tf.data.Dataset.load(str(kept))
    else:
        model, data, _ = build(folder, task, variant)
    batch, size = batch_of(data), task.batch_size or 1
    facts = Facts(
        model.distribute_strategy.num_replicas_in_sync,
        task.num_examples if task.data_batch_size else batch.num_examples,
        model.name,
        data_batch_size=task.data_batch_size or batch.size,
    )
    if not task.is_fresh:
        size = facts.possible(size)
    dataclasses.replace(facts, batch_size=size).to_json(folder / f"{task.name}.facts")
    start, inference = 0, None
    if task.is_fresh:
        start, inference = _inference(model, batch.parts, task, variant, size)
    held = _accumulators(model) if size < (task.target_batch_size or 0) else []
    run = training.train_steps(model, batch.parts, run=run, size=size, steps=task.steps)
    del held
    device = process_memory.device_peak_bytes()
    peak = process_memory.peak_process_bytes()
    # Kernels count both to some pages only, and a small model needs few more.
    memory = Memory(start, max(start, peak), inference, device)
    over = task.allowed_bytes is not None and (device or peak) > task.allowed_bytes
    outcome = "over the limit" if over else "fits"
    return dataclasses.replace(run, memory=memory, outcome=outcome)


def _inference(
    model: keras.Model, batch: Any, task: Task, variant: Variant, size: int
) -> tuple[int, int | None]:
    """Returns what is held before the model, and the peak of calls of it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    # Weights that are there already count as the model's.
    start = process_memory.process_bytes() - structure.bytes_of(model.variables)
    can_reset = process_memory.reset_peak()
    function = tf.function(
        lambda x: model(x, training=False), jit_compile=variant.jit_compile
    )
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    for each in sorted({1, *task.latency_batch_sizes, size}):
        of_size = tf.nest.map_structure(functools.partial(rows, size=each), inputs)
        tf.nest.map_structure(np.asarray, function(of_size))
    return max(start, 0), process_memory.peak_process_bytes() if can_reset else None


@contextlib.contextmanager
def _noted(what: str, notes: list[str]) -> Iterator[None]:
    """Notes why something is not known: the run itself is done, and not lost for that.

    Models, data and metrics of the user's own fail in their own ways.
    """
    try:
        yield
    except Exception as error:
        notes.append(f"{what}: {short_error(error)}")


def build(folder: Path, task: Task, variant: Variant) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model and its data, made anew from a seed."""
    keras.utils.set_random_seed(task.seed)
    build_model, train_data, validation = parcel.unpack(folder)
    model, *own = _built(build_model, task, variant)
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

    def made(data: Any) -> Any:
        if callable(data):
            data = parcel.call(data, seed=task.seed, epochs=task.epochs)
        return as_fit_takes_it(data)

    return model, made(train_data), made(validation)


def _built(build_model: Any, task: Task, variant: Variant) -> tuple[Any, ...]:
    """Returns the compiled model, and what data the function returned with it."""
    built = parcel.call(build_model, seed=task.seed, epochs=task.epochs)
    parts = parcel.parts(built, of="`build_model`", compiled=True)
    if variant.jit_compile:
        parts[0].jit_compile = True
    return parts


def _batches_of(folder: Path, task: Task) -> Path:
    """Returns where the first batches of a run are kept for its memory."""
    return folder / f"{tasks.file_name(task.policy, task.seed)}.batches"


def _accumulators(model: keras.Model) -> list[tf.Variable]:
    """Returns as much memory as adding up gradients will take, if it is not yet done.

    An optimizer that adds up holds one more copy of the trainable weights.
    """
    names = ("accumulation_steps", "gradient_accumulation_steps")
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    steps = [getattr(each, name, None) for each in (optimizer, inner) for name in names]
    if any((number or 1) > 1 for number in steps):
        return []
    with model.distribute_strategy.scope():
        return [
            tf.Variable(tf.zeros(weight.shape, weight.dtype), trainable=False)
            for weight in model.trainable_weights
        ]


def _context(command: str) -> Context:
    """Returns the machine, versions and settings of this process."""
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
        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:  # not installed, or no GPU: its errors are its own
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


if __name__ == "__main__":
    end_with_parent()
    # Where memory runs out, the kernel takes this process and no other.
    with contextlib.suppress(OSError):
        _OWN_SCORE.write_text("1000")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
