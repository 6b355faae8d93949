"""Times calls of a trained model, one batch size after the other."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.evidence import Latency

_WARMUP_CALLS = 3
_MIN_CALLS = 10
_MAX_CALLS = 1000
_SECONDS = 1.0


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
    that it has ended when its time does.

    Args:
        model: Built.
        inputs: A batch of its inputs; rows are repeated for larger sizes.
        sizes: Batch sizes.
        jit_compile: Whether XLA compiles the call.
        clock: Gives the time in seconds.

    Returns:
        The latencies, and why there are none where that is so.
    """
    found: list[Latency] = []
    function = tf.function(lambda x: model(x, training=False), jit_compile=jit_compile)
    for size in sizes:
        try:
            batch = tf.nest.map_structure(functools.partial(rows, size=size), inputs)
            for _ in range(_WARMUP_CALLS):
                _fetch(function(batch))
        except (tf.errors.OpError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())[:200]
            why = f"Calls of the model with a batch of {size} were not timed: {text}"
            return tuple(found), [why]
        seconds: list[float] = []
        began = clock()
        while len(seconds) < _MAX_CALLS and (
            len(seconds) < _MIN_CALLS or clock() - began < _SECONDS
        ):
            started = clock()
            _fetch(function(batch))
            seconds.append(clock() - started)
        found.append(Latency.of(size, seconds))
    return tuple(found), []


def rows(tensor: Any, size: int) -> Any:
    """Returns `size` rows of a tensor, its own again and again."""
    count = int(tensor.shape[0] or tf.shape(tensor)[0])
    return tf.gather(tensor, np.arange(size) % count)


def _fetch(outputs: Any) -> None:
    """Waits for the outputs by reading the first of them."""
    np.asarray(tf.nest.flatten(outputs, expand_composites=True)[0])
