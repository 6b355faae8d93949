"""Times several functions in turns until it is clear which of them is fastest.

Machines drift: clocks rise and fall, neighbours come and go. So each round runs every
function for a moment, in a new order, and what counts are the logarithms of the ratios
within a round. A function that is shown slower than the fastest drops out.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence

# Of a shorter turn the clock and the wait for the device would be a part; in longer
# ones fewer rounds see each burst of what else the machine does.
TURN_SECONDS = 0.02
_MAX_STEPS_A_TURN = 200
# Functions within this part of the fastest one are as good as it.
INDIFFERENCE = 0.03
# Rounds after which the intervals are looked at.
_LOOKS = (4, 6, 9, 13, 19, 28, 40, 60, 90)
_ERROR_RATE = 0.05
# At a look, of dropping what is as fast as the best: it costs no more than that.
_DROP_RATE = 0.01
# Of the rounds, at each end, whose ratios are left out of a mean: bursts of other work
# fall on one function and not on the next.
_TRIMMED = 0.2


@dataclasses.dataclass
class Racer:
    """A function in a race."""

    name: str  # what it is called
    # Runs a number of steps, waits for the device, returns their seconds.
    run: Callable[[int], float]
    step_seconds: float  # what a step took so far, the last estimate
    # The logarithm of the seconds of a step by round.
    logs: dict[int, float] = dataclasses.field(default_factory=dict)

    def take_turn(self, number: int) -> int:
        """Runs one turn and notes it; returns its steps."""
        wanted = math.ceil(TURN_SECONDS / max(self.step_seconds, 1e-6))
        steps = min(max(wanted, 1), _MAX_STEPS_A_TURN)
        self.step_seconds = max(self.run(steps) / steps, 1e-9)
        self.logs[number] = math.log(self.step_seconds)
        return steps


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a race ended."""

    num_rounds: int  # rounds that were run
    num_steps: int  # steps of all functions
    # Whether it ended as the order was clear, not as the budget was spent.
    is_clear: bool


def race(
    racers: Sequence[Racer],
    *,
    goes_on: Callable[[int], bool],
    seed: int = 0,
) -> Outcome:
    """Runs functions in turns until the fastest is known.

    The first one is what the others are compared with: it stays until one of them is
    shown faster than it.

    Args:
        racers: At least one; what they did is in `logs`.
        goes_on: Takes the steps so far; states whether the budget has room for more.
        seed: Of the order in the rounds.
    """
    order, active = random.Random(seed), list(racers)
    rounds, steps, is_clear = 0, 0, False
    while len(active) > 1 and goes_on(steps) and rounds < _LOOKS[-1]:
        for racer in order.sample(active, len(active)):
            steps += racer.take_turn(rounds)
        rounds += 1
        if rounds in _LOOKS:
            look = _LOOKS.index(rounds)
            rate = _ERROR_RATE / len(_LOOKS) / max(len(racers) - 1, 1)
            active = _still_in(active, racers[0], rate)
            is_clear = _is_clear(active, rate) and (look > 0 or len(active) == 1)
            if is_clear:
                break
    return Outcome(rounds, steps, is_clear or len(active) == 1)


def fastest(racers: Sequence[Racer]) -> Racer:
    """Returns the one with the lowest median over the rounds of all still in it."""
    last = max(max(racer.logs) for racer in racers)
    present = [racer for racer in racers if last in racer.logs]
    shared = set.intersection(*(set(racer.logs) for racer in present))
    return min(present, key=lambda r: statistics.median(r.logs[n] for n in shared))


def log_ratio(
    slower: Racer, faster: Racer, rate: float = _ERROR_RATE
) -> tuple[float, float, float]:
    """Returns the mean log ratio of two racers' times and its interval.

    Args:
        slower: Its time is above the line.
        faster: Its time is below.
        rate: Chance that the true value lies below the interval, and above it.

    Returns:
        Trimmed mean, lower and upper end, over the rounds that both ran; without end
        where these are fewer than two.

    Source: Tukey & McLaughlin, "Less Vulnerable Confidence and Significance Procedures
        for Location Based on a Single Sample", Sankhya 25 (1963).
    """
    both = slower.logs.keys() & faster.logs.keys()
    values = sorted(slower.logs[n] - faster.logs[n] for n in both)
    if not values:
        return math.nan, -math.inf, math.inf
    cut = int(_TRIMMED * len(values))
    middle = values[cut : len(values) - cut]
    mean = statistics.fmean(middle)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    winsorized = [middle[0]] * cut + middle + [middle[-1]] * cut
    half = student_quantile(rate, len(middle) - 1) * statistics.stdev(winsorized)
    half /= (1 - 2 * cut / len(values)) * math.sqrt(len(values))
    return mean, mean - half, mean + half


def student_quantile(rate: float, degrees: int) -> float:
    """Returns what Student's t exceeds with a chance of `rate`.

    By the expansion in 1 / degrees, which is within 1 % from five degrees on: timing
    does without SciPy, which only reports need.

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.5.

    Example:
        >>> round(student_quantile(0.05, 10), 3), round(student_quantile(0.01, 5), 2)
        (1.812, 3.36)
    """
    z = statistics.NormalDist().inv_cdf(1 - rate)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def _still_in(active: list[Racer], reference: Racer, rate: float) -> list[Racer]:
    best = fastest(active)
    is_faster = best is not reference and log_ratio(reference, best, rate)[1] > 0

    def stays(racer: Racer) -> bool:
        if racer is best or (racer is reference and not is_faster):
            return True
        return log_ratio(racer, best, _DROP_RATE)[1] <= 0

    return [racer for racer in active if stays(racer)]


def _is_clear(active: Sequence[Racer], rate: float) -> bool:
    """States whether all that are left are as good as the fastest."""
    best = fastest(active)
    limit = math.log1p(INDIFFERENCE)
    return all(r is best or log_ratio(r, best, rate)[2] < limit for r in active)
