"""`tfamp.data.bottleneck`: whether the input holds training up.

With the real pipeline a step takes `real` seconds, with batches from memory `compute`,
and the pipeline alone gives a batch in `input`.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import is_endless, known_length
from tfamp.records import checks, console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged

Cause = Literal["input", "compute", "unclear"]
# Less than this part of the step is not worth a changed pipeline.
MIN_GAIN = 0.1
# Rounds of turns, so that what disturbs the machine for a while spoils a few of all;
# the first, with cold caches, is left out. The calls at least of a turn, and those
# before it that do not count, which use up what was fetched ahead.
_ROUNDS, _CALLS = 11, 4
# Batches that stand for all others when the model is timed alone.
_MAX_KEPT, _MAX_KEPT_BYTES = 8, 256 * 2**20
_ROWS = {
    "real": "real pipeline, with the model",
    "compute": "model alone, batches from memory",
    "input": "pipeline alone",
}
_ADVICE = {
    "compute": "Leave the pipeline as it is: a perfect one would gain less than 10 %.",
    "unclear": "Measure longer (`seconds=30`) while nothing else runs on this machine.",
    "input": "Cache what is the same each epoch, by `.cache` before shuffling and "
    "augmenting{}; map in parallel and by the batch, end by `.prefetch(2)`, as a "
    "`Pipeline` does, and deliver images as uint8, which the model scales.",
}


@dataclasses.dataclass(frozen=True)
class Bottleneck(TableRecord):
    """What holds training up: the input or the model.

    `verdict` is "input", "compute" or "unclear". `possible_gain` is the part of a step
    that a perfect input would save, in [0, 1), between `gain_low` and `gain_high` in
    half of the rounds. `times` are seconds a step, one figure a round, of "real",
    "compute" and "input".
    """

    verdict: Cause
    possible_gain: float
    gain_low: float
    gain_high: float
    reason: str
    advice: str
    times: dict[str, tuple[float, ...]] = dataclasses.field(hash=False)
    batch_size: int

    @property
    def real_seconds(self) -> float:
        """Seconds of a step with the real pipeline, the median of the rounds."""
        return float(np.median(self.times["real"]))

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step with batches from memory."""
        return float(np.median(self.times["compute"]))

    def table(self) -> str:
        """Returns times, verdict and advice as text of at most 110 columns."""
        rows = []
        for name, seconds in self.times.items():
            low, middle, high = np.percentile(seconds, (25, 50, 75))
            between = f"{format_seconds(low)} to {format_seconds(high)}"
            rate = f"{self.batch_size / middle:,.0f}"
            rows.append((_ROWS[name], format_seconds(middle), between, rate))
        right = ("median", "middle half", "examples/s")
        columns = {"a step of": {}, **dict.fromkeys(right, console.RIGHT)}
        title = f"{len(self.times['real'])} rounds, batches of {self.batch_size}"
        table = console.text_of(console.table(columns, rows, title=title))
        gains = (self.possible_gain, self.gain_low, self.gain_high)
        gain, low, high = map(format_share, gains)
        return (
            f"{table}\nVerdict: {self.verdict}; {self.reason}.\n"
            f"Possible gain: {gain} of a step ({low} to {high}).\n{self.advice}"
        )


def bottleneck(
    model: keras.Model,
    dataset: Any,
    *,
    seconds: float = 20.0,
    batch_size: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> Bottleneck:
    """Returns what holds training up, how much there is to gain, and what to change.

    Timed in turns are the train step with the real pipeline, the step with batches from
    memory, and the pipeline alone. Afterwards the model is what it was, bit by bit.

    Args:
        model: A compiled model.
        dataset: A dataset of batches, or whatever else `fit` takes.
        seconds: About how long to measure, without building and tracing.
        batch_size: Examples in a batch of arrays.
        clock: Gives the time in seconds.

    Raises:
        TypeError: `model` is no Keras model, or `dataset` is not of these.
        ValueError: The model is not compiled or cannot be built, or there is no batch.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = tf.data.Dataset.from_tensors((tf.ones((8, 2)), tf.ones((8, 1))))
        >>> 0 <= bottleneck(model, data.repeat(), seconds=0.1).possible_gain < 1
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
            turns = _turns(model, dataset, batch_bytes)
            length = seconds / (len(turns) * _ROUNDS)
            timed: dict[str, list[float]] = {name: [] for name in turns}
            for number in range(_ROUNDS):
                for name, call in turns.items():
                    start, calls = clock(), 0
                    call(_CALLS)
                    warm = clock()
                    while calls < _CALLS or clock() - start < length:
                        call(_CALLS)
                        calls += _CALLS
                    timed[name] += [(clock() - warm) / calls] if number else []
    steps = int(model.steps_per_execution or 1)
    times = {name: tuple(one / steps for one in timed[name]) for name in _ROWS}
    verdict, gains, reason = judge(times["real"], times["compute"])
    epoch = (known_length(dataset) or 0) * batch_bytes
    size = f"; an epoch as delivered is {format_bytes(epoch)}" * bool(epoch)
    advice = _ADVICE[verdict].format(size)
    num_examples = int(tf.nest.flatten(first)[0].shape[0])
    return Bottleneck(verdict, *gains, reason, advice, times, num_examples)


def _turns(
    model: keras.Model, dataset: tf.data.Dataset, batch_bytes: int
) -> dict[str, Callable[[int], None]]:
    """Returns what to time, so many times over; a step is run, to compile it."""
    strategy = model.distribute_strategy
    steps = int(model.steps_per_execution or 1)
    model.make_train_function()

    def iterator(dataset: tf.data.Dataset) -> Iterator[Any]:
        if strategy.num_replicas_in_sync > 1:
            dataset = strategy.experimental_distribute_dataset(dataset)
        return iter(dataset)

    def train(batches: Iterator[Any], times: int) -> None:
        for _ in range(times):
            logs = model.train_function(batches)
        for value in tf.nest.flatten(logs)[:1]:
            keras.ops.convert_to_numpy(value)

    def draw(batches: Iterator[Any], times: int) -> None:
        for _ in range(times * steps):
            next(batches)

    number = max(1, min(_MAX_KEPT, _MAX_KEPT_BYTES // max(1, batch_bytes)))
    kept = dataset.take(number).cache()
    # To the end, since a cache counts only then; a file cache has one writer at a time.
    sum(1 for _ in kept)
    memory = iterator(kept.repeat())
    draw(memory, 1)
    train(memory, 1)
    # One for both: their epochs go on, so that a cache inside gets filled.
    source = iterator(dataset if is_endless(dataset) else dataset.repeat())
    # The input last drew all that was fetched ahead, so the real turn begins with empty
    # buffers; after it they are full or its own.
    return {
        "input": lambda times: draw(source, times),
        "real": lambda times: train(source, times),
        "compute": lambda times: train(memory, times),
    }


def judge(
    real: Sequence[float], compute: Sequence[float]
) -> tuple[Cause, tuple[float, float, float], str]:
    """Returns the verdict, the possible gain with its band, and the reason.

    Of what each round says by itself, so what slows a machine down for a while slows
    both and cancels; the band is the middle half of the rounds.
    """
    ratios = np.array(real) / np.array(compute)
    gained = np.maximum(0.0, 1 - 1 / ratios)
    low, middle, high = map(float, np.percentile(gained, (25, 50, 75)))
    gains = (middle, low, high)
    if high < MIN_GAIN:
        return "compute", gains, f"at most {high:.0%} of a step goes to the input"
    if low <= MIN_GAIN:
        return "unclear", gains, f"the noise allows a gain from {low:.0%} to {high:.0%}"
    times = float(np.median(ratios))
    return "input", gains, f"a step takes {times:.1f} times as long as without it"
