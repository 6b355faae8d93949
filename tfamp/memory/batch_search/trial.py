"""The process of one trial: `python -m tfamp.memory.batch_search.trial FOLDER SIZE`.

It trains some steps and leaves an answer. It ends itself as soon as it holds more than
it may, and when the process that started it is gone.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.machine import memory as process_memory
from tfamp.memory.batch_search import processes
from tfamp.memory.batch_search.processes import (
    ANSWER,
    FACTS,
    Batch,
    Settings,
    TrialSettings,
    batch_of,
)
from tfamp.memory.batch_search.search import TrialFacts, possible_size
from tfamp.records.checks import short_error
from tfamp.trials import child
from tfamp.trials.storage import Job
from tfamp.trials.training import rows

_OWN_SCORE = Path("/proc/self/oom_score_adj")
_LOOK_SECONDS = 0.02
# Steps are cheap beside the start of the process: short ones are repeated, since the
# median of three says little of a step of a millisecond.
_MIN_SECONDS = 0.5
_MAX_CALLS = 100


def main(argv: Sequence[str]) -> int:
    """Tries one size; returns 0 and leaves an answer, whatever came of it."""
    folder, size = Path(argv[0]), int(argv[1])
    plan = TrialSettings.from_json(folder / TrialSettings.FILE)
    settings = Settings.read(folder)
    has_gpu = bool(tf.config.get_visible_devices("GPU"))
    # Where memory runs out, the kernel takes this process and no other.
    with contextlib.suppress(OSError):
        _OWN_SCORE.write_text("1000")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    is_over = threading.Event()

    def give_up() -> None:
        held = process_memory.process_bytes()
        found = {"outcome": "over the limit", "peak_bytes": held}
        (folder / ANSWER).write_text(json.dumps(found))
        os._exit(0)

    if plan.allowed_bytes is not None and not has_gpu:
        watch(plan.allowed_bytes, give_up, is_over=is_over)
    try:
        settings.prepare_devices(plan.allowed_bytes if has_gpu else None)
        with settings.in_force():
            found = measure(folder, plan, settings, size)
    except Exception as error:
        # The whole of it goes to the log.
        traceback.print_exc()
        outcome = processes.of_error(error) or "error"
        found = {"outcome": outcome, "detail": short_error(error)}
    is_over.set()
    (folder / ANSWER).write_text(json.dumps(found))
    return 0


def measure(
    folder: Path, plan: TrialSettings, settings: Settings, size: int
) -> dict[str, Any]:
    """Builds and trains, and returns what that took."""
    process_memory.reset_device_peak()
    job = Job(plan.title, (settings.policy,), (0,), epochs=1)
    model, data, _ = child.build(folder, job, settings.variant, 0)
    batch = batch_of(data)
    size = _note(folder, plan, model, batch, size)
    held = _accumulators(model) if size < (plan.target_batch_size or 0) else []
    times = time_steps(model, batch.parts, size=size, steps=plan.steps)
    del held
    peak = process_memory.device_peak_bytes()
    if peak is None:
        peak = process_memory.peak_process_bytes()
    is_within = plan.allowed_bytes is None or peak <= plan.allowed_bytes
    return {
        "outcome": "fits" if is_within else "over the limit",
        "examples_per_second": size / times.median,
        "step_seconds": times.median,
        "first_step_seconds": times.first_step_seconds,
        "peak_bytes": peak,
    }


def _note(
    folder: Path, plan: TrialSettings, model: keras.Model, batch: Batch, size: int
) -> int:
    """Leaves what the search has to know, and returns the size that is tried."""
    facts = TrialFacts(
        model.distribute_strategy.num_replicas_in_sync,
        plan.num_examples if plan.data_batch_size else batch.num_examples,
        model.name,
        data_batch_size=plan.data_batch_size or batch.size,
    )
    size = possible_size(size, facts)
    dataclasses.replace(facts, batch_size=size).to_json(folder / FACTS)
    return size


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


def watch(
    limit_bytes: int,
    give_up: Callable[[], None],
    *,
    memory: Callable[[], int] = process_memory.process_bytes,
    is_over: threading.Event,
) -> threading.Thread:
    """Calls `give_up` as soon as this process holds more than the limit.

    The system's own way to say that memory is short may hit another program.
    """

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if memory() > limit_bytes:
                give_up()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def _end_with_parent() -> None:
    """Waits for the end of standard input, which the parent holds open."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


class Times(NamedTuple):
    """Seconds of the first step, with tracing and compiling, and of each after it."""

    first_step_seconds: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)


def time_steps(
    model: keras.Model,
    parts: Any,
    *,
    size: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Trains by `fit` on batches of `size` rows, and times the steps after the first.

    Every step gets a batch of its own, made while the one before is trained, so that
    memory holds two of them as with a pipeline that prefetches. More than `steps` are
    timed while they are short.
    """
    calls = max(steps, _MAX_CALLS)
    steps_a_call = int(getattr(model, "steps_per_execution", 1) or 1)
    enlarged = functools.partial(rows, size=size)
    dataset = (
        tf.data.Dataset.range((calls + 1) * steps_a_call)
        .map(lambda _: tf.nest.map_structure(enlarged, parts))
        .prefetch(1)
    )
    timer = _Timer(steps, clock)
    model.fit(dataset, epochs=1, verbose=0, callbacks=[timer])
    first, *rest = timer.seconds
    return Times(first, tuple(seconds / steps_a_call for seconds in rest))


class _Timer(keras.callbacks.Callback):
    """Times each call of the training function, and ends training when it is enough."""

    def __init__(self, steps: int, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._steps, self._clock = steps, clock
        self._began = clock()

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Starts the first step."""
        self._began = self._clock()

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Notes a step once its work is done."""
        # What the step returned, and its counter, are read to wait for the device.
        for value in list((logs or {}).values())[:1]:
            np.asarray(value)
        if self.model.optimizer is not None:
            np.asarray(self.model.optimizer.iterations)
        now = self._clock()
        self.seconds.append(now - self._began)
        self._began = now
        timed = self.seconds[1:]
        if len(timed) >= self._steps and sum(timed) >= _MIN_SECONDS:
            self.model.stop_training = True


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
