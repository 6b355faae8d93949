"""`bottleneck`: times a model and its pipeline, together and apart."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.records import checks
from tfamp.stepping.arguments import build, check_model, checked_dataset, first_batch
from tfamp.stepping.input_waits import advice
from tfamp.stepping.input_waits.record import Bottleneck
from tfamp.stepping.input_waits.timer import Timer
from tfamp.stepping.input_waits.verdict import Judgement, judge
from tfamp.stepping.unchanged import unchanged

# Looks at the verdict before the time is used up. On a quiet machine the first is
# enough.
_NUM_LOOKS = 4
# Of the time given, on top: for trying a prefetch where that may be missing.
_TRIAL_SHARE = 0.15
_MIN_TRIED = 0.1


def bottleneck(
    model: keras.Model,
    dataset: Any,
    *,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Bottleneck:
    """Returns what holds training up, how much there is to gain, and what to change.

    Three things are timed in turns, so that what disturbs the machine disturbs all:
    the model's train step with the real pipeline, the same step with a few batches
    from memory, and the pipeline alone. The possible gain is 1 - compute / real: the
    share of time spent waiting alone is misleading, since a pipeline also slows down
    the model that runs beside it.

    The step is the one that `fit` runs (`make_train_function`), with its
    `steps_per_execution` and `jit_compile`. Afterwards weights, optimizers, moving
    statistics, metrics and seed generators are what they were, bit by bit. A model or
    optimizer that is not built is built. Every pass over the dataset is a new
    iterator, so a seeded `shuffle` of a dataset object goes on from there; build the
    dataset anew where the exact order matters. A cache inside is timed as it is:
    empty in the first epoch. Buffers of many batches (`prefetch` of dozens) blur the
    times.

    Args:
        model: A compiled model.
        dataset: A `tf.data.Dataset` of batches, as `fit` gets it, or a `Pipeline`.
        seconds: About how long to measure at most, without building and tracing. It
            ends after a quarter if the verdict is clear by then. At least six rounds
            are made, so slow steps take longer; a prefetch that may be missing is
            tried on top.
        clock: Gives the time in seconds.

    Returns:
        The record; `print` it for a table.

    Raises:
        TypeError: `model` is no Keras model, or `dataset` is no dataset: an iterator
            or generator would be used up.
        ValueError: The model is not compiled, or holds an optimizer of its own that
            is not built; the dataset is empty or has single examples.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = tf.data.Dataset.from_tensors((tf.ones((8, 2)), tf.ones((8, 1))))
        >>> result = bottleneck(model, data.repeat(), seconds=0.1)
        >>> result.verdict in ("input", "compute", "contention", "unclear")
        True
        >>> 0 <= result.possible_gain < 1
        True
    """
    seconds = checks.positive("seconds", seconds)
    check_model(model)
    dataset = checked_dataset(dataset)
    first = first_batch(dataset)
    build(model, first)
    # Ragged and sparse batches are several tensors.
    tensors = tf.nest.flatten(first, expand_composites=True)
    batch_bytes = sum(t.dtype.size * int(tf.size(t)) for t in tensors)
    with unchanged(model):
        timer = Timer(model, dataset, batch_bytes=batch_bytes, clock=clock)
        try:
            times, judgement = until_clear(timer.measure, seconds=seconds, clock=clock)
            # Fetching ahead could regain what neither alone explains.
            if (
                judgement.verdict != "compute"
                and judgement.lost_to_sharing > _MIN_TRIED
            ):
                trial = timer.try_prefetch(_TRIAL_SHARE * seconds)
                gains = 1 - np.divide(trial["compute"], trial["prefetched"])
                judgement = judge(**times, prefetched_gains=gains.tolist())
                times["prefetched"] = trial["prefetched"]
        finally:
            timer.feed.close()
    return _record(
        dataset,
        timer,
        judgement,
        times,
        facts=advice.facts_of(dataset, model, batch_bytes=batch_bytes),
        batch_size=int(tf.nest.flatten(first)[0].shape[0]),
    )


def until_clear(
    measure: Callable[[float], dict[str, list[float]]],
    *,
    seconds: float,
    clock: Callable[[], float],
) -> tuple[dict[str, list[float]], Judgement]:
    """Returns times and what they say, with more of them while that is unclear.

    Args:
        measure: Takes the seconds to use, returns times by name.
        seconds: About how long at most.
        clock: Gives the time in seconds.
    """
    start = clock()
    times: dict[str, list[float]] = {}
    while True:
        more = measure(seconds / _NUM_LOOKS)
        times = {name: times.get(name, []) + values for name, values in more.items()}
        judgement = judge(**times)
        if judgement.verdict != "unclear" or clock() - start >= seconds:
            return times, judgement


def _record(
    dataset: tf.data.Dataset,
    timer: Timer,
    judgement: Judgement,
    times: Mapping[str, list[float]],
    *,
    facts: advice.Facts,
    batch_size: int,
) -> Bottleneck:
    real = float(np.median(times["real"]))
    start_seconds = share = None
    epoch_steps = known_length(dataset)
    starts = timer.feed.starts
    if starts and not timer.source.repeats and epoch_steps is not None:
        # The first call of an epoch is a step like others, besides.
        call = real * facts.steps_per_execution
        start_seconds = max(0.0, float(np.median(starts)) - call)
        share = start_seconds / (start_seconds + epoch_steps * real)
    return Bottleneck(
        verdict=judgement.verdict,
        possible_gain=judgement.gain,
        gain_low=judgement.gain_low,
        gain_high=judgement.gain_high,
        reason=judgement.reason,
        advice=advice.advise(
            judgement,
            facts,
            step_seconds=float(np.median(times["compute"])),
            epoch_start_share=share,
        ),
        times={
            name: tuple(times[name])
            for name in ("real", "compute", "input", "prefetched")
            if name in times
        },
        batch_size=batch_size,
        epoch_start_seconds=start_seconds,
        epoch_steps=epoch_steps,
    )
