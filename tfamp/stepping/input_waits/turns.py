"""Times several things in turns, so that what disturbs a machine disturbs all.

Nothing here knows a model or a dataset: a turn is a function that does one call,
and the clock is passed in.
"""

import dataclasses
from collections.abc import Callable, Mapping

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


def take_turns(
    turns: Mapping[str, Turn],
    *,
    clock: Callable[[], float],
    max_seconds: float,
    min_rounds: int,
    max_rounds: int,
    timed_seconds: float,
    warm_seconds: float,
    progress: Callable[[int], None] = lambda rounds: None,
) -> dict[str, list[float]]:
    """Times each turn once in every round.

    Args:
        turns: What to time, in the order of a round.
        clock: Gives seconds.
        max_seconds: When it is used up no further round begins.
        min_rounds: Rounds to make even so.
        max_rounds: Rounds to make at most.
        timed_seconds: Length of a turn, without the calls before that don't count.
        warm_seconds: Length of those.
        progress: Called with the number of rounds done.

    Returns:
        Seconds a call of each turn, one figure a round.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    start, rounds = clock(), 0
    while rounds < max_rounds:
        elapsed = clock() - start
        # A round that would end far beyond the budget is not begun.
        if rounds >= min_rounds and elapsed * (1 + 0.5 / rounds) > max_seconds:
            break
        measured = {
            name: turn.seconds_per_call(
                clock, warm_seconds=warm_seconds, timed_seconds=timed_seconds
            )
            for name, turn in turns.items()
        }
        rounds += 1
        progress(rounds)
        for name, seconds in measured.items():
            if seconds is not None and None not in measured.values():
                times[name].append(seconds)
    return times
