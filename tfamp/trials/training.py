"""Trains a model by `fit`, measures on the way, and times calls of it afterwards."""

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
from tfamp.trials.batches import rows
from tfamp.trials.clock import Clock, curve, seconds_per_step, steady
from tfamp.trials.run_records import Latency, Run, Spread

# Of calls of a trained model, for each batch size, in so many rounds.
_WARMUP_CALLS, _MIN_CALLS, _MAX_CALLS, _SECONDS = 3, 10, 1000, 1.0
ROUNDS = 5
# Of a few steps, the most calls of the training function.
_MAX_STEP_CALLS = 100


def train(
    model: keras.Model,
    data: Any,
    validation: Any,
    *,
    run: Run,
    epochs: int,
    batch_size: int | None = None,
    tell: Callable[[float], None] = lambda part: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Run, int | None, Any]:
    """Trains a compiled model, and adds the figures to `run`.

    Returns:
        The run, the bytes that NVML saw in use on a GPU, and some inputs.
    """
    fit_arguments, inputs, size, steps = arguments(data, batch_size)
    timer = Clock(steps, epochs, tell, clock=clock)
    with contextlib.ExitStack() as stack:
        nvml = Nvml.open()
        if nvml is not None:
            stack.enter_context(nvml)
        before = _energy_joules(nvml)
        history = model.fit(
            **fit_arguments,
            validation_data=validation,
            validation_batch_size=batch_size if isinstance(validation, tuple) else None,
            epochs=epochs,
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
    kept, warmup_steps = steady(timer.windows, num_epochs=epochs)
    num_steps, last_epoch = timer.windows[-1].last_step, timer.windows[-1].epoch
    # Arrays tell the mean examples of a step: the last one is shorter.
    per_step: float = size
    if isinstance(data, tuple):
        per_step = len(tf.nest.flatten(data)[0]) / (num_steps // (last_epoch + 1))
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
    notes = [stalls] if stalls else []
    optimizer, skipped = model.optimizer, 0
    if isinstance(optimizer, LossScaleOptimizer):
        skipped = int(optimizer.skipped_steps)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        why = "Keras's own loss-scale optimizer does not tell which steps it skipped."
        notes.append(why)
    run = dataclasses.replace(
        run,
        batch_size=size,
        num_steps=num_steps,
        num_epochs=epochs,
        examples_per_second=per_step / seconds,
        step=Spread.of([window.seconds_per_step for window in kept]),
        warmup_steps=warmup_steps,
        first_step_seconds=timer.first_step_seconds,
        history=plain,
        final_metrics=final,
        num_examples=round(per_step * num_steps / (last_epoch + 1)),
        losses=curve(timer.windows),
        skipped_steps=skipped,
        energy_joules=None if before is None or after is None else after - before,
        notes=(*run.notes, *notes),
    )
    return run, max(used, default=None), inputs


def train_steps(
    model: keras.Model,
    parts: Any,
    *,
    run: Run,
    size: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Trains by `fit` on batches of `size` rows of `parts`, and times the steps.

    Every step gets a batch of its own, made while the one before is trained, so that
    memory holds two of them as with a pipeline that prefetches. More than `steps` are
    timed while they are short.
    """
    steps_a_call = int(getattr(model, "steps_per_execution", 1) or 1)
    enlarged = functools.partial(rows, size=size)
    number = (max(steps, _MAX_STEP_CALLS) + 1) * steps_a_call
    dataset = (
        tf.data.Dataset.range(number)
        .map(lambda _: tf.nest.map_structure(enlarged, parts))
        .prefetch(1)
    )
    timer = Clock(None, 1, enough=steps, clock=clock)
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    timed = timer.windows[1:] or timer.windows
    step = Spread.of([window.seconds_per_step for window in timed])
    return dataclasses.replace(
        run,
        batch_size=size,
        num_steps=timer.windows[-1].last_step,
        examples_per_second=size / step.median,
        step=step,
        first_step_seconds=timer.first_step_seconds,
    )


def arguments(
    data: Any, batch_size: int | None
) -> tuple[dict[str, Any], Any, int, int | None]:
    """Returns the arguments of `fit`, some inputs, the batch size, steps an epoch."""
    if isinstance(data, tuple):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        size = batch_size or 32
        count = len(tf.nest.flatten(x)[0])
        inputs = tf.nest.map_structure(lambda each: tf.constant(each[:size]), x)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": size}
        return given, inputs, min(size, count), -(-count // size)
    if batch_size is not None:
        raise ValueError(
            f"`batch_size` is {batch_size!r}, but the training data comes in "
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
    each = [reading.energy_joules for reading in readings]
    known = [joules for joules in each if joules is not None]
    return sum(known) if known and len(known) == len(each) else None


def latencies(
    model: keras.Model,
    inputs: Any,
    *,
    sizes: Sequence[int],
    jit_compile: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size, and what went wrong.

    A call is timed from tensors on the device to numbers of the output on the host.
    Rows of `inputs` are repeated for larger sizes, which take turns.
    """
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)

    def call(batch: Any) -> None:
        np.asarray(tf.nest.flatten(function(batch), expand_composites=True)[0])

    batches: dict[int, Any] = {}
    notes: list[str] = []
    for size in sizes:
        try:
            batch = tf.nest.map_structure(functools.partial(rows, size=size), inputs)
            for _ in range(_WARMUP_CALLS):
                call(batch)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            what = f"Calls of the model with a batch of {size} were not timed"
            notes.append(f"{what}: {text}")
            break
        batches[size] = batch
    seconds: dict[int, list[float]] = {size: [] for size in batches}
    for _ in range(ROUNDS):
        for size, batch in batches.items():
            call(batch)  # caches are cold again
            began, own = clock(), 0
            while own < _MAX_CALLS // ROUNDS and (
                own < _MIN_CALLS // ROUNDS or clock() - began < _SECONDS / ROUNDS
            ):
                started = clock()
                call(batch)
                seconds[size].append(clock() - started)
                own += 1
    return tuple(Latency.of(size, each) for size, each in seconds.items()), notes
