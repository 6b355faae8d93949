"""The process of one trial of a batch size.

`python -m tfamp.trials.run.batch_trial FOLDER POLICY SEED BATCH` trains two steps with
the first rows of the data, repeated to the size, and says whether they stayed below
the job's limit. It ends itself as soon as it holds more than that.
"""

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.machine import memory as process_memory
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.trials.in_force import in_force
from tfamp.trials.job import FILE, Job
from tfamp.trials.run import child
from tfamp.trials.run.inference import rows
from tfamp.trials.run.training import arguments
from tfamp.trials.variant import Variant

_LOOK_SECONDS = 0.02
_STEPS = 2


def main(argv: Sequence[str]) -> int:
    """Tries one size and returns 0; the answer stands in a file."""
    folder, policy, seed, size = Path(argv[0]), argv[1], int(argv[2]), int(argv[3])
    job = Job.from_json(folder / FILE)
    limit = job.max_memory_bytes or 0
    answer = folder / "batch.json"
    _limit_gpus(limit)
    watch(limit, lambda: _give_up(answer))
    variant = Variant.parse(policy)
    with in_force(variant):
        model, data, _ = child.build(folder, job, variant, seed)
        fits = step_fits(model, data, job, size)
    fits = fits and (_has_gpu() or process_memory.peak_process_bytes() <= limit)
    answer.write_text(json.dumps({"batch_size": size, "fits": fits}))
    return 0


def step_fits(model: keras.Model, data: Any, job: Job, size: int) -> bool:
    """Whether training steps with a batch of `size` end without an error of memory."""
    given = arguments(data, job)[0]
    if "y" in given:
        batch = (given["x"], given["y"], given["sample_weight"])
    else:
        first = given["x"]
        batch = next(iter(first)) if isinstance(first, tf.data.Dataset) else first[0]
        batch = keras.utils.unpack_x_y_sample_weight(batch)
    enlarged = functools.partial(rows, size=size)
    x, y, weights = (
        None if part is None else tf.nest.map_structure(enlarged, part)
        for part in batch
    )
    try:
        for _ in range(_STEPS):
            model.train_on_batch(x, y, sample_weight=weights)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


def watch(
    limit_bytes: int,
    give_up: Callable[[], None],
    *,
    memory: Callable[[], int] = process_memory.process_bytes,
    is_over: threading.Event | None = None,
) -> threading.Thread:
    """Calls `give_up` as soon as this process holds more than the limit.

    The system's own way to say that memory is short may hit another program.
    """
    is_over = is_over or threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_SECONDS):
            if memory() > limit_bytes and not _has_gpu():
                give_up()
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    return thread


def _give_up(answer: Path) -> None:
    answer.write_text(json.dumps({"fits": False}))
    os._exit(0)


@functools.cache
def _has_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def _limit_gpus(limit_bytes: int) -> None:
    """Gives TensorFlow no more than the limit on each GPU."""
    for gpu in tf.config.get_visible_devices("GPU"):
        part = tf.config.LogicalDeviceConfiguration(memory_limit=limit_bytes // 2**20)
        tf.config.set_logical_device_configuration(gpu, [part])


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(main(sys.argv[1:]))
