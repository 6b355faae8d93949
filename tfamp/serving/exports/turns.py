"""Times calls of several models in turns: the one clock of `tfamp.export`."""

import time
from collections.abc import Collection, Mapping

import numpy as np

from tfamp.serving.gate import Speedup
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.statistics import interval_of_ratios

TURNS, _MIN_TURNS = 9, 5
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2

Turns = list[list[float]]
Raced = dict[tuple[str, int], Turns]


def raced(
    models: Mapping[str, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Collection[int],
    *,
    seconds: float,
) -> Raced:
    """Returns the seconds of each call by model, batch size and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes from turn to turn. Where calls are slow
    there are fewer turns.
    """
    clock = time.perf_counter
    batches: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for size in sorted(sizes):
        rows = {name: x[np.arange(size) % len(x)] for name, x in inputs.items()}
        batches |= {(name, size): each.prepared(rows) for name, each in models.items()}
    keys = list(batches)
    found: Raced = {key: [] for key in keys}
    length = seconds / TURNS / len(keys)
    ends = clock() + 2 * seconds  # what warms up has its time, too
    for turn in range(TURNS):
        if turn >= _MIN_TURNS and clock() >= ends:
            break
        first = turn % len(keys)
        for key in keys[first:] + keys[:first]:
            run, batch = models[key[0]].run, batches[key]
            for _ in range(_UNTIMED):
                run(batch)  # caches are cold again
            taken: list[float] = []
            until = clock() + length
            while len(taken) < (_MAX_CALLS if clock() < until else _MIN_CALLS):
                began = clock()
                run(batch)
                taken.append(clock() - began)
            found[key].append(taken)
    return found


def median(turns: Turns) -> float:
    """Returns the median over turns of the median call."""
    return float(np.median([*map(np.median, turns)]))


def speedup(found: Raced, other: str, own: str, size: int, *, against: str) -> Speedup:
    """Returns the seconds of another model's calls over one's own, turn by turn."""
    pairs = zip(found[other, size], found[own, size], strict=True)
    ratios = [float(np.median(theirs) / np.median(mine)) for theirs, mine in pairs]
    return Speedup(against, size, interval_of_ratios(ratios))
