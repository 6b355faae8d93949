"""Times calls of several models in turns: the one clock of `tfamp.export`."""

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from tfamp.serving.parity import Speedup
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.statistics import interval_of_ratios

TURNS, _MIN_TURNS = 9, 5
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2

Turns = list[list[float]]
Key = TypeVar("Key", bound=Hashable)


def raced(
    models: Mapping[Key, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Collection[int],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[tuple[Key, int], Turns]:
    """Returns the seconds of each call by model, batch size and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes from turn to turn. Where calls are slow
    there are fewer turns.
    """
    batches = {
        (key, size): model.prepared(rows(inputs, size))
        for key, model in models.items()
        for size in sorted(sizes)
    }
    keys = list(batches)
    found: dict[tuple[Key, int], Turns] = {key: [] for key in keys}
    length = seconds / TURNS / max(len(keys), 1)
    ends = clock() + 2 * seconds  # what warms up has its time, too
    for turn in range(TURNS):
        if turn >= _MIN_TURNS and clock() >= ends:
            break
        first = turn % max(len(keys), 1)
        for key in keys[first:] + keys[:first]:
            run, batch = models[key[0]].run, batches[key]
            for _ in range(_UNTIMED):
                run(batch)  # caches are cold again
            taken: list[float] = []
            until = clock() + length
            while len(taken) < _MIN_CALLS or (
                len(taken) < _MAX_CALLS and clock() < until
            ):
                began = clock()
                run(batch)
                taken.append(clock() - began)
            found[key].append(taken)
    return found


def median(turns: Turns) -> float:
    """Returns the median over turns of the median call."""
    return float(np.median([*map(np.median, turns)]))


def pace(turns: Mapping[Any, Turns], key: Any, sizes: Collection[int]) -> float:
    """Returns the seconds of a model's call, the geometric mean over batch sizes."""
    return float(np.exp(np.mean([np.log(median(turns[key, size])) for size in sizes])))


def rows(x: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Returns the first rows of inputs, again and again where there are too few."""
    return {name: each[np.arange(size) % len(each)] for name, each in x.items()}


def speedup(other: Turns, own: Turns, *, against: str, batch_size: int) -> Speedup:
    """Returns the seconds of another model's calls over one's own, turn by turn.

    Example:
        >>> speedup([[2.0], [2.0]], [[1.0], [1.0]], against="x", batch_size=1).ratio
        Interval(estimate=2.0, low=2.0, high=2.0)
    """
    theirs, mine = ([float(np.median(turn)) for turn in side] for side in (other, own))
    ratios = interval_of_ratios([a / b for a, b in zip(theirs, mine, strict=True)])
    return Speedup(against, batch_size, ratios)
