"""Times calls of several models in turns, and what one costs a fresh process."""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records.checks import first_line, short_error
from tfamp.records.console import progress
from tfamp.serving.parity import fresh
from tfamp.serving.parity.result import FreshProcess, Speedup
from tfamp.trials import processes
from tfamp.trials.intervals import Interval
from tfamp.trials.run_records import Latency
from tfamp.tuning.races import student_quantile

TURNS = 9
# Of all turns and sizes, unless a single call takes longer.
SECONDS = 4.0
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2
# Chance that the true ratio lies below an interval, and above it.
_ERROR_RATE = 0.05
_QUANTILES = (50, 90, 99)
_FRESH_SECONDS = 120.0
SAVED_MODEL, XLA = "SavedModel", "XLA"

Call = Callable[[Any], Any]


@contextlib.contextmanager
def stock_calls(model: Any, inputs: Any) -> Iterator[tuple[dict[str, Call], list[str]]]:
    """Yields a Keras model's SavedModel signature and its XLA function, with notes.

    What cannot be made for inputs like those given is left out and noted.
    """
    calls: dict[str, Call] = {}
    notes: list[str] = []
    if not isinstance(model, keras.Model):
        yield calls, notes
        return
    with tempfile.TemporaryDirectory(prefix="tfamp-parity-") as folder:
        for name, make in ((SAVED_MODEL, _signature), (XLA, _xla)):
            try:
                calls[name] = make(model, inputs, folder)
            except Exception as error:  # noqa: BLE001 - exporters raise anything
                notes.append(f"Not timed against {name}: {short_error(error)}")
        yield calls, notes


def rows(x: Any, size: int) -> Any:
    """Returns the first rows of inputs, again and again where there are too few."""
    return tf.nest.map_structure(
        lambda each: np.ascontiguousarray(each[np.arange(size) % len(each)]), x
    )


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    *,
    turns: int = TURNS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[list[float]]]:
    """Returns the seconds of each call by name and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes from turn to turn.
    """
    names = list(calls)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    length = seconds / turns / max(len(names), 1)
    for turn in range(turns):
        for name in np.roll(names, turn).tolist():
            call = calls[name]
            for _ in range(_UNTIMED):
                call()  # caches are cold again
            found[name].append(_one_turn(call, length, clock))
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
        ratios.append(_interval(np.log(of_each[0]) - np.log(of_each[1])))
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
                sides[name] = _with(call, batch)
            done(number + 1)
            if "" not in sides:
                continue
            found = in_turns(sides, seconds=seconds / len(sizes))
            own = found.pop("")
            latencies.append(Latency.of(size, [s for turn in own for s in turn]))
            for name, theirs in found.items():
                speedups.append(speedup(theirs, own, against=name, batch_size=size))
    return tuple(latencies), tuple(speedups), notes


def in_fresh_process(
    path: Path, inputs: Mapping[str, np.ndarray], name: str
) -> FreshProcess:
    """Returns what loading a model and one answer cost a process of its own.

    Args:
        path: What `tfamp.load_exported` takes.
        inputs: One example, by names of the signature.
        name: What the result calls it.

    Raises:
        RuntimeError: The process failed, or took longer than two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="tfamp-fresh-") as folder:
        given, log = Path(folder, "inputs.npz"), Path(folder, "log")
        arrays: dict[str, Any] = {str(key): value for key, value in inputs.items()}
        np.savez(given, **arrays)
        began = time.monotonic()
        process = processes.start(fresh.__name__, [str(path), str(given)], log)
        try:
            status = process.wait(_FRESH_SECONDS)
        except BaseException as error:
            processes.end(process)
            if isinstance(error, Exception):
                raise RuntimeError(
                    f"Loading {str(path)!r} took over {_FRESH_SECONDS:g} s."
                ) from error
            raise
        finally:
            processes.close_input(process)
        lines = log.read_text(errors="replace").splitlines()
    words = lines[-1].split() if lines else []
    if status or len(words) != 3 or words[0] != fresh.ANSWERED:
        tail = lines[-1] if lines else processes.why_ended(status)
        raise RuntimeError(f"A fresh process cannot run {str(path)!r}: {tail}")
    return FreshProcess(name, float(words[1]) - began, int(words[2]))


def _signature(model: keras.Model, inputs: Any, folder: str) -> Call:
    """Returns a call of the model's signature, from a file that holds it."""
    # TensorFlow's own writer, as Keras's `export` prints.
    holder = tf.Module()
    holder.model = model
    flat = tf.nest.flatten(inputs)

    def outputs(*x: Any) -> dict[str, Any]:
        found = model(tf.nest.pack_sequence_as(inputs, x), training=False)
        return {f"y{i}": each for i, each in enumerate(tf.nest.flatten(found))}

    function = tf.function(outputs, autograph=False)
    concrete = function.get_concrete_function(
        *(
            tf.TensorSpec((None, *each.shape[1:]), each.dtype, f"x{i}")
            for i, each in enumerate(flat)
        )
    )
    path = str(Path(folder, "saved_model"))
    tf.saved_model.save(holder, path, signatures=concrete)
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["serving_default"]

    def call(x: Any, owner: Any = loaded) -> Any:  # its weights go with the owner
        given = enumerate(tf.nest.flatten(x))
        found = signature(**{f"x{i}": tf.constant(each) for i, each in given})
        return {key: value.numpy() for key, value in found.items()}

    return call


def _xla(model: keras.Model, inputs: Any, folder: str) -> Call:
    def outputs(x: Any) -> Any:
        return model(x, training=False)

    function = tf.function(outputs, jit_compile=True, autograph=False)

    def call(x: Any) -> Any:
        found = function(tf.nest.map_structure(tf.constant, x))
        return tf.nest.map_structure(lambda each: each.numpy(), found)

    return call


def _with(call: Call, batch: Any) -> Callable[[], Any]:
    return lambda: call(batch)


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


def _interval(logs: np.ndarray) -> Interval:
    middle = float(np.mean(logs))
    if len(logs) < 2:
        return Interval(math.exp(middle), 0.0, math.inf)
    half = student_quantile(_ERROR_RATE, len(logs) - 1)
    half *= float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return Interval(*(math.exp(middle + side * half) for side in (0, -1, 1)))
