"""Times several things in turns, so that what disturbs a machine disturbs all.

Nothing here knows a model or a dataset: a turn is a function that does one call,
and the clock is passed in.
"""

import dataclasses
from collections.abc import Callable, Mapping

from tfamp.records.progress import progress

# Many short turns rather than few long ones: what disturbs a machine for half a second
# then spoils a few rounds of all. Below five rounds a noise band means little.
_MIN_ROUNDS, MAX_ROUNDS = 5, 40
# The first round finds caches cold and buffers empty.
_NUM_WARM_ROUNDS = 1
# Of a turn, what is not counted.
_WARM_SHARE = 0.4
# A device works on while Python goes on; it is waited for once in so many calls,
# unless calls are long.
_CALLS_TO_WAIT = 8
_LONG_SECONDS = 0.002
# Calls of a turn, however long they take. Before, what the last turn left is used
# up: batches that were fetched ahead while something else ran.
_MIN_CALLS = 4
_MIN_WARM_CALLS = 3


@dataclasses.dataclass
class Excluded:
    """Time and calls that belong to no step, such as the start of an epoch."""

    seconds: float = 0.0
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """One thing to time.

    Attributes:
        call: Does it once.
        wait: Waits until the device has done it.
        excluded: What `call` adds to when it does something else as well.
    """

    call: Callable[[], None]
    wait: Callable[[], None] = lambda: None
    excluded: Excluded = dataclasses.field(default_factory=Excluded)

    def seconds_per_call(
        self,
        clock: Callable[[], float],
        *,
        warm_seconds: float,
        timed_seconds: float,
    ) -> float | None:
        """Returns the mean time of a call, after some that are not counted.

        The mean rather than the median: batches that come in bursts, as from
        parallel calls, have two typical times, and none of them is the rate.

        Returns:
            None if every call was excluded.
        """
        self._run(clock, warm_seconds, _MIN_WARM_CALLS)
        seconds, calls = self._run(clock, timed_seconds, _MIN_CALLS)
        return seconds / calls if calls else None

    def _run(
        self, clock: Callable[[], float], seconds: float, min_calls: int
    ) -> tuple[float, int]:
        """Calls for a while; returns the seconds and the calls that count."""
        before = dataclasses.replace(self.excluded)
        start, calls, burst = clock(), 0, 1
        while calls < min_calls or clock() - start < seconds:
            for _ in range(burst):
                self.call()
            self.wait()
            calls += burst
            mean = (clock() - start) / calls
            burst = 1 if mean > _LONG_SECONDS else _CALLS_TO_WAIT
        left_out = self.excluded.seconds - before.seconds
        counted = calls - (self.excluded.calls - before.calls)
        return clock() - start - left_out, counted


def time_in_rounds(
    turns: Mapping[str, Turn],
    *,
    seconds: float,
    clock: Callable[[], float],
    max_rounds: int = MAX_ROUNDS,
    label: str = "Timing the input",
) -> dict[str, list[float]]:
    """Returns seconds a call of each turn, one figure a round, the first left out.

    Args:
        turns: What to time, in the order of a round.
        seconds: About how long. When it is used up no further round begins, unless
            there are too few.
        clock: Gives the time in seconds.
        max_rounds: Rounds at most; turns are as long as makes so many of them.
        label: What the progress bar says.
    """
    rounds = max_rounds + _NUM_WARM_ROUNDS
    length = seconds / (len(turns) * rounds)
    times: dict[str, list[float]] = {name: [] for name in turns}
    start = clock()
    with progress(label, rounds, unit="rounds") as done:
        for number in range(rounds):
            # A round that would end far beyond the budget is not begun.
            is_enough = number >= _MIN_ROUNDS + _NUM_WARM_ROUNDS
            if is_enough and (clock() - start) * (1 + 0.5 / number) > seconds:
                break
            measured = {
                name: turn.seconds_per_call(
                    clock,
                    warm_seconds=length * _WARM_SHARE,
                    timed_seconds=length * (1 - _WARM_SHARE),
                )
                for name, turn in turns.items()
            }
            done(number + 1)
            for name, value in measured.items():
                if value is not None and None not in measured.values():
                    times[name].append(value)
    return {name: values[_NUM_WARM_ROUNDS:] or values for name, values in times.items()}
