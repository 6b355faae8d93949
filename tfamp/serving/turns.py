"""Times calls of several models in turns: the one clock of `tfamp.export`."""

import functools
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tfamp.records.console import progress
from tfamp.serving.parity import Speedup
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.statistics import Interval, interval_of_ratios

TURNS, _MIN_TURNS = 9, 5
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2
_QUANTILES = (50, 90, 99)

Turns = list[list[float]]
Key = TypeVar("Key", bound=Hashable)


def in_turns(
    calls: Mapping[Key, Callable[[], Any]],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Turns]:
    """Returns the seconds of each call by key and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes from turn to turn. Where calls are slow
    there are fewer turns.
    """
    keys = list(calls)
    found: dict[Key, Turns] = {key: [] for key in keys}
    length = seconds / TURNS / max(len(keys), 1)
    ends = clock() + 2 * seconds  # what warms up has its time, too
    with progress("Timing in turns", TURNS, unit="turns") as done:
        for turn in range(TURNS):
            if turn >= _MIN_TURNS and clock() >= ends:
                break
            first = turn % max(len(keys), 1)
            for key in keys[first:] + keys[:first]:
                for _ in range(_UNTIMED):
                    calls[key]()  # caches are cold again
                found[key].append(_one_turn(calls[key], length, clock))
            done(turn + 1)
    return found


def raced(
    models: Mapping[Key, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Iterable[int],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[tuple[Key, int], Turns]:
    """Runs models in turns on batches of each size, whose rows are the inputs'."""
    calls = {}
    for name, model in models.items():
        prepared = model.prepared(dict(inputs))
        for size in sorted({*sizes}):
            calls[name, size] = functools.partial(model.run, rows(prepared, size))
    return in_turns(calls, seconds=seconds, clock=clock)


def median(turns: Turns) -> float:
    """Returns the median over turns of the median call."""
    return float(np.median([*map(np.median, turns)]))


def slowdowns(
    turns: Mapping[tuple[Key, int], Turns], sizes: Collection[int]
) -> dict[Key, float]:
    """Returns times the fastest model each takes, the geometric mean over sizes.

    Example:
        >>> slowdowns({("a", 1): [[2.0]], ("b", 1): [[1.0]]}, {1})
        {'a': 2.0, 'b': 1.0}
    """
    logs = {
        name: sum(math.log(max(median(turns[name, size]), 1e-9)) for size in sizes)
        for name, _ in turns
    }
    least = min(logs.values())
    return {name: math.exp((log - least) / len(sizes)) for name, log in logs.items()}


def rows(x: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Returns the first rows of inputs, again and again where there are too few."""
    return {
        name: np.ascontiguousarray(each[np.arange(size) % len(each)])
        for name, each in x.items()
    }


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
    ratios: list[Interval] = []
    for quantile in _QUANTILES:
        theirs, mine = (
            np.array([np.percentile(turn, quantile, method="higher") for turn in side])
            for side in (other, own)
        )
        ratios.append(interval_of_ratios((theirs / mine).tolist()))
    return Speedup(against, batch_size, *ratios)


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
