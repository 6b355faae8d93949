"""Trains a model by `fit`, measures on the way, and times calls of it afterwards.

The runs of a seed take turns in both, so that what slows the machine for a while slows
all policies and all batch sizes alike.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.machine.nvml import Nvml
from tfamp.stepping.arguments import dataset_of, first_batch
from tfamp.trials.clock import Clock, curve, seconds_per_step, steady
from tfamp.trials.processes import Line
from tfamp.trials.run_records import Latency, Run, Spread
from tfamp.trials.storage import Job

# Of calls of a trained model, for each batch size.
_WARMUP_CALLS = 3
_MIN_CALLS = 10
_MAX_CALLS = 1000
_SECONDS = 1.0
# So many times, a fraction of those each.
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run with what training measured, and what later measurements need of it."""

    run: Run
    device_used_bytes: int | None
    inputs: Any


def train(
    model: keras.Model,
    data: Any,
    validation: Any,
    *,
    job: Job,
    run: Run,
    line: Line | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trained:
    """Trains a compiled model for the epochs of a job, and adds the figures to `run`.

    By `line` it tells how far it is.
    """
    fit_arguments, inputs, size, steps = arguments(data, job)
    timer = Clock(steps, job.epochs, line or Line(), clock)
    with contextlib.ExitStack() as stack:
        nvml = Nvml.open()
        if nvml is not None:
            stack.enter_context(nvml)
        before = _energy_joules(nvml)
        of_arrays = job.batch_size if isinstance(validation, tuple) else None
        history = model.fit(
            **fit_arguments,
            validation_data=validation,
            validation_batch_size=of_arrays,
            epochs=job.epochs,
            verbose=0,
            callbacks=[timer],
        ).history
        after = _energy_joules(nvml)
        # On the fullest GPU; TensorFlow gives none back.
        readings = () if nvml is None else nvml.read()
        used = [r.memory_used_bytes for r in readings if r.memory_used_bytes]
    if not timer.windows:
        raise ValueError(
            "The training data holds no batch; expected at least one. Look at its "
            "source: a wrong path, split or filter leaves nothing."
        )
    kept, warmup_steps = steady(timer.windows, num_epochs=job.epochs)
    num_steps = timer.windows[-1].last_step
    steps_an_epoch = num_steps // (timer.windows[-1].epoch + 1)
    # Arrays tell the mean examples of a step: the last one is shorter.
    is_arrays = isinstance(data, tuple)
    per_step = len(tf.nest.flatten(data)[0]) / steps_an_epoch if is_arrays else size
    seconds, stalls = seconds_per_step(kept)
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
    skipped, scales, notes = _scale_of(model, timer)
    run = dataclasses.replace(
        run,
        batch_size=size,
        num_steps=num_steps,
        num_epochs=job.epochs,
        examples_per_second=per_step / seconds,
        step=Spread.of([window.seconds / window.steps for window in kept]),
        warmup_steps=warmup_steps,
        first_step_seconds=timer.first_step_seconds,
        history=plain,
        final_metrics=final,
        num_examples=round(per_step * num_steps / (timer.windows[-1].epoch + 1)),
        losses=curve(timer.windows),
        loss_scales=scales,
        skipped_steps=skipped,
        energy_joules=None if before is None or after is None else after - before,
        notes=(*notes, *([stalls] if stalls else [])),
    )
    return Trained(run, max(used, default=None), inputs)


def arguments(data: Any, job: Job) -> tuple[dict[str, Any], Any, int, int | None]:
    """Returns the arguments of `fit`, some inputs, the batch size, steps an epoch."""
    if isinstance(data, tuple):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        size = job.batch_size or 32
        count = len(tf.nest.flatten(x)[0])
        inputs = tf.nest.map_structure(lambda each: tf.constant(each[:size]), x)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": size}
        return given, inputs, min(size, count), -(-count // size)
    if job.batch_size is not None:
        raise ValueError(
            f"`batch_size` is {job.batch_size!r}, but the training data comes in "
            "batches; expected None with a dataset. Batch the dataset so."
        )
    dataset = dataset_of(data)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The training data has no end; expected a dataset that ends. Add "
            "`.take(steps)`."
        )
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch(dataset))
    size = int(tf.nest.flatten(inputs, expand_composites=True)[0].shape[0])
    given = data if isinstance(data, keras.utils.PyDataset) else dataset
    return {"x": given}, inputs, size, known_length(dataset)


def _energy_joules(nvml: Nvml | None) -> float | None:
    """Returns what all GPUs have used since some time, None where one does not tell."""
    readings = () if nvml is None else nvml.read()
    # Power between two readings so far apart says little: counters only.
    each = [r.energy_joules if r.energy_source == "counter" else None for r in readings]
    known = [joules for joules in each if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def _scale_of(
    model: keras.Model, clock: Clock
) -> tuple[int, tuple[tuple[int, float], ...], list[str]]:
    """Returns skipped steps, where the loss scale changed, and what is not known."""
    optimizer = model.optimizer
    if isinstance(optimizer, LossScaleOptimizer):
        changes: list[tuple[int, float]] = []
        for step, scale in clock.scales:
            if not changes or changes[-1][1] != scale:
                changes.append((step, scale))
        is_scaled = any(scale != 1 for _, scale in changes)
        return int(optimizer.skipped_steps), tuple(changes) if is_scaled else (), []
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        why = "Keras's own loss-scale optimizer does not tell which steps it skipped."
        return 0, (), [why]
    return 0, (), []


def latencies(
    model: keras.Model,
    inputs: Any,
    *,
    sizes: Sequence[int],
    jit_compile: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size.

    A call is timed from tensors on the device to numbers of the output on the host, so
    that it has ended when its time does. Rows of `inputs` are repeated for larger
    sizes.
    """
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)
    batches: dict[int, Any] = {}
    notes: list[str] = []
    for size in sizes:
        try:
            batch = tf.nest.map_structure(functools.partial(rows, size=size), inputs)
            for _ in range(_WARMUP_CALLS):
                _fetch(function(batch))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            notes = [
                f"Calls of the model with a batch of {size} were not timed: {text}"
            ]
            break
        batches[size] = batch
    seconds: dict[int, list[float]] = {size: [] for size in batches}
    for _ in range(ROUNDS):
        for size, batch in batches.items():
            _fetch(function(batch))  # caches are cold again
            seconds[size] += _round(functools.partial(function, batch), clock)
    return tuple(Latency.of(size, each) for size, each in seconds.items()), notes


def _round(call: Callable[[], Any], clock: Callable[[], float]) -> list[float]:
    """Returns the seconds of the calls of one round."""
    seconds: list[float] = []
    began = clock()
    while len(seconds) < _MAX_CALLS // ROUNDS and (
        len(seconds) < _MIN_CALLS // ROUNDS or clock() - began < _SECONDS / ROUNDS
    ):
        started = clock()
        _fetch(call())
        seconds.append(clock() - started)
    return seconds


def rows(tensor: Any, size: int) -> Any:
    """Returns `size` rows of a tensor, its own again and again."""
    count = int(tensor.shape[0] or tf.shape(tensor)[0])
    return tf.gather(tensor, np.arange(size) % count)


def _fetch(outputs: Any) -> None:
    """Waits for the outputs by reading the first of them."""
    np.asarray(tf.nest.flatten(outputs, expand_composites=True)[0])
