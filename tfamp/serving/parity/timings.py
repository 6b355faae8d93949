"""Times calls of several models in turns."""

import contextlib
import functools
import math
import tempfile
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfamp.graph.bodies import has_texts
from tfamp.records.checks import first_line, short_error
from tfamp.records.console import progress
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.tracing import SIGNATURE, trace
from tfamp.serving.exports.writers import write_saved_model
from tfamp.serving.parity.metrics import mean_interval
from tfamp.serving.parity.result import Speedup
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import Interval

TURNS, _MIN_TURNS = 9, 5
# Of all turns and sizes, unless a single call takes longer.
SECONDS = 4.0
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2
_QUANTILES = (50, 90, 99)

Call = Callable[[Any], Any]
Key = TypeVar("Key", bound=Hashable)


@contextlib.contextmanager
def stock_calls(
    model: keras.Model, inputs: Any
) -> Iterator[tuple[dict[str, Call], list[str]]]:
    """Yields a Keras model's SavedModel signature and its XLA function, with notes.

    What cannot be made for inputs like those given is left out and noted.
    """
    calls: dict[str, Call] = {}
    notes: list[str] = []
    makers = {"SavedModel": _signature, "XLA": _xla}
    with tempfile.TemporaryDirectory(prefix="tfamp-parity-") as folder:
        for name, make in makers.items():
            try:
                calls[name] = make(model, inputs, Path(folder))
            except Exception as error:  # noqa: BLE001 - exporters raise anything
                notes.append(f"Not timed against {name}: {short_error(error)}")
        yield calls, notes


def _signature(model: keras.Model, inputs: Any, folder: Path) -> Call:
    """Returns a call of the model's signature, from a file that holds it."""
    traced = trace(model, inputs)
    write_saved_model(traced, folder, Request("saved_model", "float32"))
    loaded = tf.saved_model.load(str(folder))
    signature = loaded.signatures[SIGNATURE]

    def call(x: Any, owner: Any = loaded) -> Any:  # its weights go with the owner
        given = zip(traced.specs, traced.flatten(x), strict=True)
        found = signature(**{spec.name: tf.cast(x, spec.dtype) for spec, x in given})
        return {key: value.numpy() for key, value in found.items()}

    return call


def _xla(model: keras.Model, inputs: Any, folder: Path) -> Call:
    def outputs(x: Any) -> Any:
        return model(x, training=False)

    function = tf.function(outputs, jit_compile=True, autograph=False)
    given = tf.nest.map_structure(tf.constant, inputs)
    if has_texts(function.get_concrete_function(given).graph):
        raise ValueError("XLA has no texts.")

    def call(x: Any) -> Any:
        found = function(tf.nest.map_structure(tf.constant, x))
        return tf.nest.map_structure(lambda each: each.numpy(), found)

    return call


def rows(x: Any, size: int) -> Any:
    """Returns the first rows of inputs, again and again where there are too few."""
    return tf.nest.map_structure(
        lambda each: np.ascontiguousarray(each[np.arange(size) % len(each)]), x
    )


def in_turns(
    calls: Mapping[Key, Callable[[], Any]],
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[list[float]]]:
    """Returns the seconds of each call by key and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes from turn to turn. Where calls are slow
    there are fewer turns.
    """
    keys = list(calls)
    found: dict[Key, list[list[float]]] = {key: [] for key in keys}
    length = seconds / TURNS / max(len(keys), 1)
    ends = clock() + 2 * seconds  # what warms up has its time, too
    for turn in range(TURNS):
        if turn >= _MIN_TURNS and clock() >= ends:
            break
        first = turn % max(len(keys), 1)
        for key in keys[first:] + keys[:first]:
            for _ in range(_UNTIMED):
                calls[key]()  # caches are cold again
            found[key].append(_one_turn(calls[key], length, clock))
    return found


def speedup(
    other: Sequence[Sequence[float]],
    own: Sequence[Sequence[float]],
    *,
    against: str,
    batch_size: int,
) -> Speedup:
    """Returns the seconds of another model's calls over one's own, turn by turn.

    Example:
        >>> found = speedup([[2.0], [2.0]], [[1.0], [1.0]], against="x", batch_size=1)
        >>> found.p50
        Interval(estimate=2.0, low=2.0, high=2.0)
    """
    ratios = []
    for quantile in _QUANTILES:
        of_each = [
            [float(np.percentile(turn, quantile, method="higher")) for turn in side]
            for side in (other, own)
        ]
        logs = mean_interval(np.log(of_each[0]) - np.log(of_each[1]))
        ratios.append(Interval(*map(math.exp, logs)))
    return Speedup(against, batch_size, *ratios)


def measured(
    candidate: Call,
    others: Mapping[str, Call],
    inputs: Any,
    sizes: Sequence[int],
    *,
    seconds: float,
) -> tuple[tuple[Latency, ...], tuple[Speedup, ...], list[str]]:
    """Returns latencies of a model and its speed over others, at each batch size."""
    latencies, speedups, notes = [], [], []
    with progress("Timing in turns", len(sizes), unit="sizes") as done:
        for number, size in enumerate(sizes):
            batch = rows(inputs, size)
            sides: dict[str, Callable[[], Any]] = {}
            for name, call in {"": candidate, **others}.items():
                try:
                    call(batch)
                except Exception as error:  # noqa: BLE001 - runtimes raise anything
                    what = name or "the exported model"
                    why = first_line(error)
                    notes.append(f"No batch of {size} was timed for {what}: {why}")
                    continue
                sides[name] = functools.partial(call, batch)
            done(number + 1)
            if "" not in sides:
                continue
            found = in_turns(sides, seconds=seconds / len(sizes))
            own = found.pop("")
            latencies.append(Latency.of(size, [s for turn in own for s in turn]))
            for name, theirs in found.items():
                speedups.append(speedup(theirs, own, against=name, batch_size=size))
    return tuple(latencies), tuple(speedups), notes


def _one_turn(
    call: Callable[[], Any], length: float, clock: Callable[[], float]
) -> list[float]:
    seconds: list[float] = []
    ends = clock() + length
    while len(seconds) < _MIN_CALLS or (len(seconds) < _MAX_CALLS and clock() < ends):
        began = clock()
        call()
        seconds.append(clock() - began)
    return seconds


class Pace(NamedTuple):
    """How fast a model is.

    Args:
        seconds: Of a call with the smallest batch, the median over rounds.
        slowdown: Times the fastest one it takes, the geometric mean over batch sizes;
            1.0 for the fastest.
    """

    seconds: float
    slowdown: float


def raced(
    models: Mapping[str, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Collection[int],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Pace]:
    """Runs models in short turns, and returns the pace of each by its median turn.

    Inputs are repeated to fill a batch of each size.
    """
    sizes = sorted(sizes)
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for name, model in models.items():
        prepared = model.prepared(dict(inputs))
        for size in sizes:
            calls[name, size] = functools.partial(model.run, rows(prepared, size))
    turns = in_turns(calls, seconds=seconds, clock=clock)
    found = {key: float(np.median([*map(np.median, turns[key])])) for key in calls}
    logs = {
        name: float(np.mean([math.log(max(found[name, size], 1e-9)) for size in sizes]))
        for name in models
    }
    least = min(logs.values())
    return {
        name: Pace(found[name, sizes[0]], math.exp(logs[name] - least))
        for name in models
    }
