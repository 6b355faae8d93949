"""The process of one trial: `python -m tfamp.trials.worker FOLDER TASK`.

It builds a model from a seed and trains it whole, or a few steps of one batch size, by
`fit`, and leaves a `Run`, of whatever came of it. It ends itself when the process that
started it is gone.
"""

import contextlib
import ctypes
import dataclasses
import gc
import math
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.data._elements import known_length
from tfamp.keras_hooks import structure
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.machine import memory as process_memory
from tfamp.machine.memory import Nvml
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.plan import read_plan
from tfamp.records.checks import first_line, short_error
from tfamp.stepping.arguments import dataset_of, first_batch
from tfamp.trials import parcel, scores
from tfamp.trials.parcel import batch_of, rows, size_of
from tfamp.trials.run_records import (
    Latency,
    Memory,
    Run,
    Task,
    possible_size,
)
from tfamp.trials.variant import Variant, in_force

# Steps are timed in windows: of a shorter one a clock and a read of the loss, which
# waits for the device, would be a part.
_WINDOW_SECONDS = 0.1
_WARMUP_PART, _MAX_WARMUP_STEPS, _MIN_EPOCHS = 0.1, 50, 3
# Of windows, at either end.
_TRIMMED_PART = 0.125
# More points than this a curve does not show.
_MAX_POINTS = 400
# Of a few steps that are short, so many seconds; and the most calls of them.
_ENOUGH_SECONDS, _MAX_STEP_CALLS = 0.5, 100
# Of calls of a trained model.
_WARMUP_CALLS, _MIN_CALLS, _MAX_CALLS, _SECONDS = 3, 10, 1000, 1.0


def main(argv: Sequence[str]) -> int:
    """Does a task and leaves a record; returns 0, or 1 if it failed."""
    folder, task = Path(argv[0]), Task.from_json(argv[1])
    record = folder / f"{task.name}.json"
    try:
        _limit_gpu(task.allowed_bytes)
        variant = Variant.parse(task.policy)
        with in_force(variant) as (resolved, reason):
            plan = read_plan(variant.policy)
            if plan is not None and plan.jit_compile:
                resolved += "+xla"
            run = Run(task.policy, task.seed, resolved_policy=resolved, reason=reason)
            process_memory.reset_device_peak()
            measure = _few_steps if task.steps else _whole
            run = measure(folder, task, variant, run)
    except Exception as error:
        # The whole of it goes to the log; the record has what it comes to.
        traceback.print_exc()
        errors = [error, error.__cause__ or error]  # as others' libraries tell it
        outcome = "out of memory" if any(map(is_out_of_memory, errors)) else ""
        begun = Run(task.policy, task.seed, "failed")
        begun = Run.from_json(record) if record.is_file() else begun
        why = short_error(error)
        run = dataclasses.replace(begun, error=why, outcome=outcome)
    run.to_json(record)
    return 0 if run.is_finished else 1


def _limit_gpu(limit: int | None) -> None:
    """Has TensorFlow take no more of each GPU; the runner watches a process on CPUs."""
    for gpu in tf.config.get_visible_devices("GPU") if limit else ():
        part = tf.config.LogicalDeviceConfiguration((limit or 0) // 2**20)
        tf.config.set_logical_device_configuration(gpu, [part])


def _whole(folder: Path, task: Task, variant: Variant, run: Run) -> Run:
    """Trains one model whole and returns what that measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, data, validation = _build(folder, task, variant)
    ours = [str(w.message) for w in caught if os.path.dirname(__file__) in w.filename]
    print(*(w.message for w in caught), sep="\n", file=sys.stderr)
    run = dataclasses.replace(run, notes=tuple(dict.fromkeys(ours)))
    part = folder / f"{task.name}.part"
    run, inputs = train(
        *(model, data, validation),
        run=run,
        epochs=task.epochs,
        batch_size=task.batch_size,
        tell=lambda clock, all: part.write_text(f"{clock.done / all:.4f}"),
    )
    device = process_memory.device_peak_bytes()
    notes, num_examples = list(run.notes), run.num_examples
    if validation is not None:
        size, num_examples = task.batch_size or 32, 0
        try:
            num_examples = scores.write_examples(
                folder / task.name, model, validation, run.final_metrics, size
            )
        except Exception as error:  # of data and metrics of the user's own
            why = short_error(error)
            notes.append(f"The metric of single examples is not known: {why}")
    sizes = sorted({1, run.batch_size})
    latencies, why_not = _latencies(model, inputs, sizes, variant.jit_compile)
    weights = [np.asarray(weight, np.float32) for weight in model.get_weights()]
    return dataclasses.replace(
        run,
        num_parameters=model.count_params(),
        num_examples=num_examples,
        num_nonfinite_weights=int(sum((~np.isfinite(w)).sum() for w in weights)),
        latencies=latencies,
        memory=Memory(process_memory.process_bytes(), device_bytes=device),
        layers={row.path: row.compute_dtype for row in tfamp.assignment(model)},
        notes=(*notes, *why_not),
    )


def _few_steps(folder: Path, task: Task, variant: Variant, run: Run) -> Run:
    """Trains some steps of one batch size, and returns their times and memory.

    Every step gets a batch of its own, made while the one before is trained, as by a
    pipeline that prefetches. More steps than asked for are timed while they are short.
    """
    model, data, _ = _build(folder, task, variant)
    batch = batch_of(data)
    replicas = model.distribute_strategy.num_replicas_in_sync
    known = task.num_examples if task.data_batch_size else batch.num_examples
    size = possible_size(task.batch_size or 1, replicas, known)
    facts: Any = {"model": model.name, "replicas": replicas, "batch_size": size}
    facts["data_batch_size"] = task.data_batch_size or batch.size
    facts["num_examples"] = known or 0
    # Before the steps, which may end this process.
    begun = dataclasses.replace(run, status="failed", **facts)
    begun.to_json(folder / f"{task.name}.json")
    calls = max(task.steps, _MAX_STEP_CALLS) + 1
    numbers = tf.data.Dataset.range(calls * int(model.steps_per_execution or 1))
    dataset = numbers.map(lambda _: rows(batch.parts, size)).prefetch(1)

    def stop(clock: Clock, all: float) -> None:
        timed = clock.windows[1:]
        if sum(window.steps for window in timed) >= task.steps:
            seconds = sum(window.seconds for window in timed)
            model.stop_training = seconds >= _ENOUGH_SECONDS

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    # Weights that are there already count as the model's.
    weights = structure.bytes_of(model.variables)
    start = max(process_memory.process_bytes() - weights, 0)
    process_memory.reset_peak()
    held = []
    if size < (task.target_batch_size or 0):
        # An optimizer that adds up holds one more copy of the trainable weights.
        with model.distribute_strategy.scope():
            held = [tf.Variable(tf.zeros_like(w)) for w in model.trainable_weights]
    run, _ = train(model, dataset, None, run=run, epochs=1, tell=stop)
    del held
    device = process_memory.device_peak_bytes()
    peak = process_memory.peak_process_bytes()
    is_over = task.allowed_bytes is not None and (device or peak) > task.allowed_bytes
    return dataclasses.replace(
        run,
        **facts,
        # Kernels count both to some pages only, and a small model needs few more.
        memory=Memory(start, max(start, peak), device),
        outcome="over the limit" if is_over else "fits",
    )


def _build(folder: Path, task: Task, variant: Variant) -> tuple[keras.Model, Any, Any]:
    """Returns the compiled model and its data, made anew from a seed."""
    keras.utils.set_random_seed(task.seed)
    build_model, train_data, validation = parcel.unpack(folder)
    how = {"seed": task.seed, "epochs": task.epochs}
    compared = None if task.steps else task.epochs
    built = parcel.call(build_model, compared_epochs=compared, **how)
    model, *own = parcel.parts(built, of="`build_model`", compiled=True)
    if variant.jit_compile:
        model.jit_compile = True
    if (train_data is None) == (own[0] is None):
        raise ValueError(
            "Training data came twice, or not at all; expected `train`, or a "
            "`build_model` that returns (model, train, validation). Pass one of them."
        )
    made = own if train_data is None else (train_data, validation)
    made = [parcel.call(each, **how) if callable(each) else each for each in made]
    return model, *map(parcel.as_fit_takes_it, made)


class Window(NamedTuple):
    """Some training steps of an epoch that were timed together, counted from 1."""

    epoch: int
    last_step: int
    steps: int
    seconds: float
    loss: float | None  # as `fit` logs it, the mean since the epoch began


class Clock(keras.callbacks.Callback):
    """Times windows of steps, and calls `on_window` after each, which may end `fit`."""

    def __init__(
        self, steps_an_epoch: int | None, on_window: Callable[["Clock"], None]
    ) -> None:
        super().__init__()
        self.windows: list[Window] = []
        self.done = 0
        self._steps_an_epoch, self._on_window = steps_an_epoch, on_window
        self._logs: Mapping[str, Any] = {}
        self._epoch = self._before = self._first = 0
        self._opened = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Opens the first window of the epoch."""
        self._epoch, self._before, self._first = epoch, self.done, self.done
        self._opened = time.perf_counter()

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Closes the window ahead of the first epoch's last step, often a new trace."""
        following = self.done + int(self.model.steps_per_execution or 1)
        if self._epoch == 0 and following >= (self._steps_an_epoch or math.inf):
            self._close()

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Closes the window if it is long enough; the first holds the first step."""
        self._logs = logs or {}
        # Of a call of several steps; the last one of an epoch may have fewer.
        self.done += int(self.model.steps_per_execution or 1)
        if self._steps_an_epoch:
            self.done = min(self.done, self._before + self._steps_an_epoch)
        is_long = time.perf_counter() - self._opened >= _WINDOW_SECONDS
        if is_long or not self.windows:
            self._close()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window: what follows is no training."""
        self._close()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Closes the window that is open where there was no validation."""
        self._close()

    def _close(self) -> None:
        if self.done == self._first:
            return
        loss = None  # reading it, or the counter, waits for the device
        if "loss" in self._logs:
            loss = float(np.asarray(self._logs["loss"]))
        elif self.model.optimizer is not None:
            np.asarray(self.model.optimizer.iterations)
        seconds, steps = time.perf_counter() - self._opened, self.done - self._first
        self.windows.append(Window(self._epoch, self.done, steps, seconds, loss))
        self._on_window(self)
        self._first, self._opened = self.done, time.perf_counter()


def _seconds_per_step(windows: Sequence[Window], steps: int | None = None) -> float:
    """Returns the mean time of a step, but for the warm-up and for stalls.

    The first of three epochs or more is left out, which traces and fills caches of the
    input; of fewer the first tenth, or 50 steps, and the first epoch's last of so many
    `steps`, as a smaller batch is traced anew. So are the slowest and the fastest
    windows: a machine that stalls for seconds says nothing about a policy.
    """
    kept = [window for window in windows if window.epoch > 0]
    if windows[-1].epoch + 1 < _MIN_EPOCHS:
        last = min(_WARMUP_PART * windows[-1].last_step, _MAX_WARMUP_STEPS)
        end = steps or max(window.last_step for window in windows if window.epoch == 0)
        kept = [w for w in windows[1:] if w.last_step > last and w.last_step != end]
    kept = sorted(
        kept or windows[-1:], key=lambda window: window.seconds / window.steps
    )
    cut = max(int(_TRIMMED_PART * len(kept)), int(len(kept) > 2))
    kept = kept[cut : len(kept) - cut]
    return sum(window.seconds for window in kept) / sum(w.steps for w in kept)


def train(
    model: keras.Model,
    data: Any,
    validation: Any,
    *,
    run: Run,
    epochs: int,
    batch_size: int | None = None,
    tell: Callable[[Clock, float], Any] = lambda clock, all: None,
) -> tuple[Run, Any]:
    """Trains a compiled model; returns `run` with the figures, and some inputs.

    `tell` gets the clock after each window, and the steps of all epochs, inf where they
    are not known.
    """
    is_arrays, steps = isinstance(data, tuple), None
    if is_arrays:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        size, number = batch_size or 32, len(tf.nest.flatten(x)[0])
        inputs = tf.nest.map_structure(lambda each: tf.constant(each[:size]), x)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": size}
        size, steps = min(size, number), -(-number // size)
    else:
        dataset = dataset_of(data)
        number = int(dataset.cardinality())
        if batch_size is not None or number == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"`batch_size` is {batch_size!r} for a dataset of {number:,} batches; "
                "expected None, and a dataset that ends (not -1). Add `.take(steps)`."
            )
        inputs = keras.utils.unpack_x_y_sample_weight(first_batch(dataset))[0]
        size, steps = size_of(inputs), known_length(dataset)
        given = {"x": data if isinstance(data, keras.utils.PyDataset) else dataset}
    clock = Clock(steps, lambda clock: tell(clock, epochs * (steps or math.inf)))
    with Nvml.open() or contextlib.nullcontext() as nvml:
        before = _energy_joules(nvml)
        history = model.fit(
            **given,
            validation_data=validation,
            validation_batch_size=batch_size if isinstance(validation, tuple) else None,
            epochs=epochs,
            verbose=0,
            callbacks=[clock],
        ).history
        after = _energy_joules(nvml)
    seconds = _seconds_per_step(clock.windows, steps)
    steps = clock.done // (clock.windows[-1].epoch + 1)
    # Arrays tell the mean examples of a step: the last one is shorter.
    per_step = number / steps if is_arrays else size
    prefix = "" if validation is None else "val_"
    plain = {
        name: tuple(float(value) for value in values)
        for name, values in history.items()
        if np.ndim(values[0]) == 0
    }
    final = {
        name.removeprefix(prefix): values[-1]
        for name, values in plain.items()
        if name.startswith(prefix) and (prefix or not name.startswith("val_"))
    }
    notes, optimizer, skipped = list(run.notes), model.optimizer, 0
    if isinstance(optimizer, LossScaleOptimizer):
        skipped = int(optimizer.skipped_steps)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        why = "Keras's own loss-scale optimizer does not tell which steps it skipped."
        notes.append(why)
    points = [(w.last_step, w.loss) for w in clock.windows if w.loss is not None]
    every = math.ceil(len(points) / _MAX_POINTS) or 1
    run = dataclasses.replace(
        run,
        batch_size=size,
        num_steps=clock.done,
        num_epochs=epochs,
        examples_per_second=per_step / seconds,
        step_seconds=seconds,
        first_step_seconds=clock.windows[0].seconds,
        history=plain,
        final_metrics=final,
        num_examples=round(per_step * steps),
        losses=tuple(points[::-every][::-1]),  # the last one among them
        skipped_steps=skipped,
        energy_joules=None if before is None or after is None else after - before,
        notes=tuple(notes),
    )
    return run, inputs


def _energy_joules(nvml: Nvml | None) -> float | None:
    """Returns what all GPUs have used since some time, None where one does not tell."""
    each = [reading.energy_joules for reading in (nvml.read() if nvml else ())]
    known = [joules for joules in each if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def _latencies(
    model: keras.Model, inputs: Any, sizes: Sequence[int], jit_compile: bool
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size, and what went wrong."""
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)
    found: list[Latency] = []
    for size in sizes:
        seconds: list[float] = []
        try:
            batch = rows(inputs, size)
            while len(seconds) < _WARMUP_CALLS + _MAX_CALLS and (
                len(seconds) < _WARMUP_CALLS + _MIN_CALLS
                or sum(seconds[_WARMUP_CALLS:]) < _SECONDS
            ):
                began = time.perf_counter()
                outputs = tf.nest.flatten(function(batch), expand_composites=True)
                np.asarray(outputs[0])
                seconds.append(time.perf_counter() - began)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            what = f"Calls of the model with a batch of {size} were not timed"
            return tuple(found), [f"{what}: {first_line(error)}"]
        found.append(Latency.of(size, seconds[_WARMUP_CALLS:]))
    return tuple(found), []


def _end_with_parent() -> None:
    """Ends this process once the one that started it, and held its input, is gone."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Where memory runs out, the kernel takes this process and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.exit(main(sys.argv[1:]))
