"""Times loaded exports in turns until it is clear which of them is fastest."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfamp.serving.parity.timings import rows
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.tuning.races import TURN_SECONDS, Racer, fastest, log_ratio, race

_MOST_CALLS = 200
Call = Callable[[], Any]


class Pace(NamedTuple):
    """How fast a model is.

    Args:
        seconds: Of a call with the smallest batch, the median over rounds.
        slowdown: Times the fastest one it takes, the geometric mean over batch sizes;
            1.0 for the fastest.
    """

    seconds: float
    slowdown: float


@dataclasses.dataclass
class AtSizes(Racer):
    """A model in a race, at several batch sizes, none of which outweighs the others.

    Attributes:
        calls: One for each size, the smallest first.
        smallest: The seconds of a call of the first, by round.
    """

    calls: Sequence[Call] = ()
    smallest: list[float] = dataclasses.field(default_factory=list)

    def take_turn(self, number: int) -> int:
        """Runs each size for a moment, and notes the mean of the logarithms."""
        logs, calls = [], 0
        for call in self.calls:
            found, steps = _seconds(call, 1), 0
            if found < TURN_SECONDS:  # it only says how many: caches were cold
                steps = math.ceil(TURN_SECONDS / max(found, 1e-6))
                steps = min(steps, _MOST_CALLS)
                found = max(_seconds(call, steps), 1e-9)
            logs.append(math.log(found))
            calls += steps + 1
        self.smallest.append(math.exp(logs[0]))
        self.logs[number] = float(np.mean(logs))
        return calls


def raced(
    models: Mapping[str, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Collection[int],
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Pace]:
    """Runs models in turns until the fastest is clear, and returns the pace of each.

    A model that is shown slower than another one drops out, so that what time there is
    goes to those that are close.

    Args:
        models: By name, at least one.
        inputs: Examples by name of the signature, repeated to fill a batch.
        sizes: Batch sizes.
        seconds: To spend; each takes some turns at least.
        clock: Tells the seconds.
    """
    racers = []
    for name, model in models.items():
        prepared = model.prepared(dict(inputs))
        calls = [_call(model, rows(prepared, size)) for size in sorted(sizes)]
        for call in calls:
            call()
        racers.append(AtSizes(name, lambda steps: 0.0, 0.0, calls=calls))
    if len(racers) == 1:
        racers[0].take_turn(0)
    ends = clock() + seconds
    race(racers, goes_on=lambda steps: clock() < ends or not racers[0].logs)
    best = fastest(racers)
    return {
        each.name: Pace(
            float(np.median(each.smallest)),
            1.0 if each is best else math.exp(log_ratio(each, best)[0]),
        )
        for each in racers
    }


def _seconds(call: Call, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _call(model: LoadedModel, inputs: Mapping[str, np.ndarray]) -> Call:
    return lambda: model.run(inputs)
