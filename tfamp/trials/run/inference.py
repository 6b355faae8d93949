"""Times calls of a trained model, all batch sizes in several short rounds.

The runs of a seed take turns in them, as in training, so that what slows the machine
for a while slows all policies and all sizes alike.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.trials.run_records import Latency
from tfamp.trials.turns import Line

_WARMUP_CALLS = 3
_MIN_CALLS = 10
_MAX_CALLS = 1000
_SECONDS = 1.0
# So many times, a fraction of those each.
ROUNDS = 5


def latencies(
    model: keras.Model,
    inputs: Any,
    *,
    sizes: Sequence[int],
    jit_compile: bool = False,
    line: Line | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[Latency, ...], list[str]]:
    """Returns the latency of a traced call for each batch size.

    A call is timed from tensors on the device to numbers of the output on the host, so
    that it has ended when its time does. Rows of `inputs` are repeated for larger
    sizes.
    """
    line = line or Line()
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
    line.wait_for_others()
    for _ in range(ROUNDS):
        line.wait_for_turn()
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
