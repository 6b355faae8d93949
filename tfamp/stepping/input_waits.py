"""`tfamp.data.bottleneck`: whether the input holds training up.

With the real pipeline a step takes `real` seconds, with batches from memory `compute`,
and the pipeline alone gives a batch in `input`. A perfect pipeline would bring `real`
down to `compute`. What is lost to a pipeline that is slow by itself is
`input - compute`; what is lost although neither alone takes that long is
`real - max(input, compute)`: both want the same cores, or wait for one another.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import inputs_of, is_endless, known_length
from tfamp.records import checks, console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, format_seconds, format_share
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.unchanged import seeds_put_back, unchanged

Cause = Literal["input", "compute", "contention", "unclear"]
# Less than this part of the step is not worth a changed pipeline.
MIN_GAIN = 0.1
# Bounds of the noise band: 95 % of the resampled medians lie inside.
_BAND, _NUM_RESAMPLES = (2.5, 97.5), 2000
# Many short rounds rather than few long ones: what disturbs a machine for half a second
# then spoils a few of all. A clear verdict after ten ends them. The first finds caches
# cold and buffers empty, and is left out.
_MIN_ROUNDS, _ROUNDS_A_LOOK, _MAX_ROUNDS = 5, 10, 40
# The part of a turn, and its calls, that do not count: batches that were fetched ahead
# while something else ran are used up in them.
_WARM_SHARE, _MIN_WARM_CALLS, _MIN_CALLS = 0.4, 3, 4
# A device works on while Python goes on; it is waited for once in so many calls,
# unless calls are long.
_CALLS_TO_WAIT, _LONG_SECONDS = 8, 0.002
# Batches that stand for all others when the model is timed alone.
_MAX_KEPT, _MAX_KEPT_BYTES = 8, 256 * 2**20
_ROWS = {
    "real": "real pipeline, with the model",
    "compute": "model alone, batches from memory",
    "input": "pipeline alone",
}
# What is timed, and what waits for the device after it.
Turn = tuple[Callable[[], None], Callable[[], None]]


@dataclasses.dataclass(frozen=True)
class Bottleneck(TableRecord):
    """What holds training up: the input, the model, or both at the same cores.

    Args:
        verdict: "input", "compute", "contention" or "unclear".
        possible_gain: Part of a step that a perfect input would save, in [0, 1).
        gain_low: Lower end of its noise band (95 %).
        gain_high: Upper end of its noise band.
        reason: Why, in one sentence.
        advice: What to change first.
        times: Seconds a step, one figure a round: "real", "compute" and "input".
        batch_size: Examples in a batch.
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

    @property
    def input_seconds(self) -> float:
        """Seconds that the pipeline alone takes for the batch of a step."""
        return float(np.median(self.times["input"]))

    def table(self) -> str:
        """Returns times, verdict and advice as text of at most 110 columns."""
        rows = []
        for name, seconds in self.times.items():
            low, middle, high = np.percentile(seconds, (25, 50, 75))
            between = f"{format_seconds(low)} to {format_seconds(high)}"
            rate = f"{self.batch_size / middle:,.0f}"
            rows.append((_ROWS[name], format_seconds(middle), between, rate))
        right = ("median", "middle half", "examples/s")
        table = console.table(
            {"a step of": {}, **dict.fromkeys(right, console.RIGHT)},
            rows,
            title=f"{len(self.times['real'])} rounds, batches of {self.batch_size}",
        )
        gain, *band = map(
            format_share, (self.possible_gain, self.gain_low, self.gain_high)
        )
        return (
            f"{console.text_of(table)}\nVerdict: {self.verdict}; {self.reason}.\n"
            f"Possible gain: {gain} of a step ({' to '.join(band)}).\n{self.advice}"
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

    Three things are timed in turns, so that what disturbs the machine disturbs all:
    the model's train step (that of `fit`) with the real pipeline, the same step with a
    few batches from memory, and the pipeline alone. Afterwards weights, optimizers,
    statistics, metrics and seed generators are what they were, bit by bit; what is not
    built is built. A cache inside is empty in the first epoch. Buffers of dozens of
    batches blur the times.

    Args:
        model: A compiled model.
        dataset: What `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a
            `PyDataset`, a generator of batches, or arrays (x, y, sample_weight).
        seconds: About how long to measure at most, without building and tracing. It
            ends after a quarter if the verdict is clear then; slow steps take longer.
        batch_size: Examples in a batch of arrays.
        clock: Gives the time in seconds.

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
            turns = _turns(model, dataset, batch_bytes)
            times = time_in_rounds(turns, seconds=seconds, clock=clock)
    steps = int(model.steps_per_execution or 1)
    times = {name: [one / steps for one in times[name]] for name in _ROWS}
    verdict, gains, reason = judge(**times)
    return Bottleneck(
        verdict,
        *gains,
        reason,
        _advice(verdict, dataset, batch_bytes),
        {name: tuple(values) for name, values in times.items()},
        batch_size=int(tf.nest.flatten(first)[0].shape[0]),
    )


def _turns(
    model: keras.Model, dataset: tf.data.Dataset, batch_bytes: int
) -> dict[str, Turn]:
    """Returns what to time; a step is run at once, which compiles it."""
    strategy = model.distribute_strategy
    steps = int(model.steps_per_execution or 1)
    model.make_train_function()
    logs: list[Any] = []

    def iterator(dataset: tf.data.Dataset) -> Iterator[Any]:
        if strategy.num_replicas_in_sync > 1:
            dataset = strategy.experimental_distribute_dataset(dataset)
        return iter(dataset)

    def train(batches: Iterator[Any]) -> None:
        logs[:] = tf.nest.flatten(model.train_function(batches))[:1]

    def wait() -> None:
        """Waits for the last step, by reading what it returned."""
        for value in logs:
            keras.ops.convert_to_numpy(value)

    @tf.function(reduce_retracing=True)
    def draw(batches: Any) -> None:
        for _ in tf.range(steps):
            next(batches)

    full = _full_batches(dataset)
    number = max(1, min(_MAX_KEPT, _MAX_KEPT_BYTES // max(1, batch_bytes)))
    kept = full.take(number).cache()
    # To the end, since a cache counts only then; a file cache has one writer at a time.
    sum(1 for _ in kept)
    memory = iterator(kept.repeat())
    draw(memory)
    train(memory)
    wait()
    # One for both: their epochs go on, so that a cache inside gets filled.
    source = iterator(full if is_endless(full) else full.repeat())
    # The input last drew all that was fetched ahead, so the real turn begins with empty
    # buffers; after it they are full or its own.
    return {
        "input": (lambda: draw(source), lambda: None),
        "real": (lambda: train(source), wait),
        "compute": (lambda: train(memory), wait),
    }


def _full_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without batches smaller than its first, if only that varies."""
    specs = tf.nest.flatten(dataset.element_spec)
    is_fixed = all(
        isinstance(spec, tf.TensorSpec) and spec.shape[1:].is_fully_defined()
        for spec in specs
    )
    if not is_fixed or all(spec.shape[0] is not None for spec in specs):
        return dataset
    size = tf.shape(tf.nest.flatten(next(iter(dataset.take(1))))[0])[0]
    return dataset.filter(
        lambda *parts: tf.equal(tf.shape(tf.nest.flatten(parts)[0])[0], size)
    )


def time_in_rounds(
    turns: Mapping[str, Turn], *, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Returns seconds a call of each turn, one figure a round, the first left out."""
    length = seconds / (len(turns) * (_MAX_ROUNDS + 1))
    times: dict[str, list[float]] = {name: [] for name in turns}
    start = clock()
    with console.progress("Timing the input", _MAX_ROUNDS, unit="rounds") as done:
        for number in range(_MAX_ROUNDS + 1):
            if number > _MIN_ROUNDS:
                is_late = (clock() - start) * (1 + 0.5 / number) > seconds
                is_look = number % _ROUNDS_A_LOOK == 0
                if is_late or (is_look and judge(**times)[0] != "unclear"):
                    break
            for name, (call, wait) in turns.items():
                _calls(call, wait, clock, length * _WARM_SHARE, _MIN_WARM_CALLS)
                timed = length * (1 - _WARM_SHARE)
                figure = _calls(call, wait, clock, timed, _MIN_CALLS)
                times[name] += [figure] if number else []
            done(number)
    return times


def _calls(
    call: Callable[[], None],
    wait: Callable[[], None],
    clock: Callable[[], float],
    seconds: float,
    least: int,
) -> float:
    """Calls for a while; returns the mean seconds: batches may come in bursts."""
    start, calls, burst = clock(), 0, 1
    while calls < least or clock() - start < seconds:
        for _ in range(burst):
            call()
        wait()
        calls += burst
        is_long = (clock() - start) / calls > _LONG_SECONDS
        burst = 1 if is_long else _CALLS_TO_WAIT
    return (clock() - start) / calls


def judge(
    real: Sequence[float], compute: Sequence[float], input: Sequence[float]
) -> tuple[Cause, tuple[float, float, float], str]:
    """Returns the verdict, the possible gain with its noise band, and the reason.

    Figures are medians over rounds of what each round says by itself, so what slows a
    machine down for a while slows all three and cancels. (On two cores shared with
    other work, medians of each kind apart left a band of 2.2, pairs one of 0.16.)

    Example:
        >>> judge([10.0] * 5, [2.0] * 5, [10.0] * 5)[:2]
        ('input', (0.8, 0.8, 0.8))

    Source: the bootstrap's percentile interval, Efron and Tibshirani, An Introduction
    to the Bootstrap, 1993, chapter 13.
    """
    whole, model, alone = (np.array(times) for times in (real, compute, input))
    gain = 1 - model / whole
    to_input = np.maximum(alone - model, 0) / whole
    to_sharing = np.maximum(whole - np.maximum(alone, model), 0) / whole
    rounds = np.array([gain, to_input, to_sharing])
    number = rounds.shape[1]
    chosen = np.random.default_rng(0).integers(number, size=(_NUM_RESAMPLES, number))
    gains, inputs, sharings = np.median(rounds[:, chosen], axis=2)
    low, high = np.percentile(gains, _BAND)
    more_low, more_high = np.percentile(sharings - inputs, _BAND)
    middle, lost, shared = np.median(rounds, axis=1)
    verdict: Cause = "unclear"
    if high < MIN_GAIN:
        verdict = "compute"
        reason = f"at most {_percent(high)} of a step goes to the input"
    elif low <= MIN_GAIN:
        reason = (
            f"the noise allows a gain from {_percent(low)} to {_percent(high)}, and "
            f"{_percent(MIN_GAIN)} is where the input begins to matter"
        )
    elif more_low > 0:
        verdict = "contention"
        reason = (
            f"{_percent(shared)} of a step is explained by neither alone: input and "
            "model compete for the same cores, or wait for one another"
        )
    elif more_high < 0:
        verdict = "input"
        ratio = np.median(alone / model)
        reason = f"alone, the input takes {ratio:.1f} times as long as the model"
    else:
        reason = (
            f"{_percent(lost)} of a step is lost to a slow input and "
            f"{_percent(shared)} to competition; the noise does not tell which is more"
        )
    figures = [max(0.0, float(one)) for one in (middle, low, high)]
    return verdict, (figures[0], figures[1], figures[2]), reason


def _percent(share: float) -> str:
    return f"{100 * max(0.0, float(share)):.0f} %"


def _advice(verdict: Cause, dataset: tf.data.Dataset, batch_bytes: int) -> str:
    """Returns what to change first, in one sentence."""
    if verdict == "compute":
        return "Leave the pipeline as it is: a perfect one would gain less than 10 %."
    if verdict == "unclear":
        return "Measure longer (`seconds=30`) while nothing else runs on this machine."
    inputs = tf.nest.flatten(inputs_of(dataset.element_spec))
    if any(x.dtype.is_floating and (x.shape.rank or 0) > 3 for x in inputs):
        return (
            "Deliver images as uint8 and scale them in the model: the cast on the CPU "
            "is most of the cost of a decoded batch, and a batch is 4 times smaller."
        )
    if verdict == "contention":
        return (
            "End the pipeline with `.prefetch(2)`; where it does, cache what is the "
            "same each epoch, or give the input fewer threads than there are cores."
        )
    length, size = known_length(dataset), ""
    if length is not None:
        size = f"; an epoch as delivered is {format_bytes(length * batch_bytes)}"
    return (
        "Cache what is the same each epoch, by `.cache` before shuffling and "
        f"augmenting{size}; map in parallel and by the batch, as a `Pipeline` does."
    )
