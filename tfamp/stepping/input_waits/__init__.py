"""`tfamp.data.bottleneck`: whether the input holds training up."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.records import checks
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.input_waits import advice
from tfamp.stepping.input_waits.feed import (
    MAX_ROUNDS,
    Feed,
    Source,
    Turn,
    kept_batches,
    prepare,
    time_in_rounds,
)
from tfamp.stepping.input_waits.verdict import Bottleneck, Judgement, judge
from tfamp.stepping.unchanged import seeds_put_back, unchanged

_TRIAL_ROUNDS = 12
# Looks at the verdict before the time is used up. On a quiet machine the first is
# enough.
_NUM_LOOKS = 4
# Of the time given, on top: for trying a prefetch where that may be missing.
_TRIAL_SHARE = 0.15
_MIN_TRIED = 0.1


class Timer:
    """Runs the turns of one model and dataset, whose batches have `batch_bytes`.

    A step is run at once, which compiles it.
    """

    def __init__(
        self,
        model: keras.Model,
        dataset: tf.data.Dataset,
        *,
        batch_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._clock = model, clock
        self._steps = int(model.steps_per_execution or 1)
        self._strategy = model.distribute_strategy
        model.make_train_function()
        self._logs: Any = None
        self.source = prepare(dataset, self._steps)
        self._kept = self._iterator_of(
            kept_batches(self.source, self._steps, batch_bytes=batch_bytes)
        )
        self._draw = _draw_function(self._steps)
        # Traces and compiles, which belongs to no turn and no start of an epoch.
        self._draw(self._kept)
        self._train(self._kept)
        self._wait()
        self.feed = self._feed_of(self.source)
        self._compute = Turn(lambda: self._train(self._kept), self._wait)

    def measure(self, seconds: float) -> dict[str, list[float]]:
        """Returns seconds a step, of the real thing, the model and the input."""
        # The input last drew all that was fetched ahead, so the real turn begins
        # with empty buffers; after it they are full or its own.
        excluded = self.feed.excluded
        turns = {
            "input": Turn(lambda: self.feed.call(self._draw), excluded=excluded),
            "real": Turn(lambda: self.feed.call(self._train), self._wait, excluded),
            "compute": self._compute,
        }
        return self._times(turns, seconds, MAX_ROUNDS, "Timing the input")

    def try_prefetch(self, seconds: float) -> dict[str, list[float]]:
        """Returns seconds a step of the pipeline with a prefetch, and of the model."""
        dataset = self.source.dataset.prefetch(2)
        source = Source(dataset, self.source.calls_per_epoch, self.source.repeats)
        # Not beside it: a file cache has one writer, and buffers take memory.
        self.feed.close()
        feed = self._feed_of(source)
        turns = {
            "prefetched": Turn(
                lambda: feed.call(self._train), self._wait, feed.excluded
            ),
            "compute": self._compute,
        }
        try:
            return self._times(turns, seconds, _TRIAL_ROUNDS, "Trying a prefetch")
        finally:
            feed.close()

    def _times(
        self, turns: Mapping[str, Turn], seconds: float, max_rounds: int, label: str
    ) -> dict[str, list[float]]:
        """Returns seconds a step."""
        times = time_in_rounds(
            turns,
            seconds=seconds,
            clock=self._clock,
            max_rounds=max_rounds,
            label=label,
        )
        return {
            name: [value / self._steps for value in values]
            for name, values in times.items()
        }

    def _train(self, iterator: Iterator[Any]) -> None:
        self._logs = self._model.train_function(iterator)

    def _wait(self) -> None:
        """Waits for the last step, by reading what it returned."""
        for value in tf.nest.flatten(self._logs)[:1]:
            keras.ops.convert_to_numpy(value)

    def _feed_of(self, source: Source) -> Feed:
        return Feed(
            lambda: self._iterator_of(source.dataset),
            source.calls_per_epoch,
            clock=self._clock,
            wait=self._wait,
        )

    def _iterator_of(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        if self._strategy.num_replicas_in_sync > 1:
            dataset = self._strategy.experimental_distribute_dataset(dataset)
        return iter(dataset)


def _draw_function(steps: int) -> Callable[[Any], None]:
    """Returns a function that draws batches as a train function does, and no more."""

    @tf.function(reduce_retracing=True)
    def draw(iterator: Any) -> None:
        for _ in tf.range(steps):
            next(iterator)

    return draw


def bottleneck(
    model: keras.Model,
    dataset: Any,
    *,
    seconds: float = 20.0,
    batch_size: int = 32,
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
        dataset: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y), with sample weights
            or without.
        seconds: About how long to measure at most, without building and tracing. It
            ends after a quarter if the verdict is clear by then. At least six rounds
            are made, so slow steps take longer; a prefetch that may be missing is
            tried on top.
        batch_size: Examples in a batch of arrays.
        clock: Gives the time in seconds.

    Returns:
        The record; `print` it for a table.

    Raises:
        TypeError: `model` is no Keras model, or `dataset` is not of these: an iterator
            would be used up.
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
    with seeds_put_back():
        dataset = dataset_of(dataset, batch_size, name="dataset")
        first = first_batch(dataset)
        build(model, first)
        # Ragged and sparse batches are several tensors.
        tensors = tf.nest.flatten(first, expand_composites=True)
        batch_bytes = sum(t.dtype.size * int(tf.size(t)) for t in tensors)
        with unchanged(model):
            timer = Timer(model, dataset, batch_bytes=batch_bytes, clock=clock)
            try:
                times, judgement = until_clear(
                    timer.measure, seconds=seconds, clock=clock
                )
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

    `measure` takes the seconds to use, a part of `seconds`, and returns times by name.
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
    facts: advice.InputFacts,
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
