"""Runs a model's train step and its pipeline in turns, together and apart."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfamp.stepping.input_waits.feed import Feed, Source, kept_batches, prepare
from tfamp.stepping.input_waits.turns import MAX_ROUNDS, Turn, time_in_rounds

_TRIAL_ROUNDS = 12


class Timer:
    """Runs the turns of one model and dataset.

    Args:
        model: A compiled and built model. A step is run at once, which compiles it.
        dataset: Batches.
        batch_bytes: Size of one.
        clock: Gives the time in seconds.

    Attributes:
        source: How the dataset is iterated.
        feed: Draws from it.
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
