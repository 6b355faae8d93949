"""From times of steps to the record of shares of a step, a verdict and what to change.

A step of some replicas takes as long as the slowest of them computes, and the part of
the reduction that is not hidden behind it. Steps without the reduction are timed in
turns with the real ones, so each round gives ratios in which drifts of the machine
cancel; intervals are those of the logarithms of these ratios.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tfamp.records.record import Record
from tfamp.records.units import format_bytes, format_share, join_words
from tfamp.stepping.input_waits import MIN_GAIN, Bottleneck
from tfamp.trials.intervals import Interval, interval, interval_of_ratios

Kind = Literal["logical CPUs", "GPUs", "workers"]
Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")
Verdict = Literal[
    "scales", "communication", "input", "slow worker", "not equal", "unclear"
]
# On either side: intervals hold 95 %.
_RATE = 0.025
# Less than this part of a step is not worth a change, as for the input.
MIN_SHARE = MIN_GAIN
# From here on devices of their own are said to scale.
_GOOD_EFFICIENCY = 0.9


def size_of(mode: Mode, batch_size: int, replicas: int) -> int:
    """Returns the examples of a step of all replicas together.

    Strong scaling divides the batch of one device, weak scaling gives each replica one.

    Example:
        >>> size_of("strong", 32, 4), size_of("weak", 32, 4)
        (32, 128)
    """
    return batch_size * replicas if mode == "weak" else batch_size


@dataclasses.dataclass(frozen=True)
class Equality(Record):
    """Whether the first steps of some replicas were those of one device.

    Args:
        replicas: How many.
        is_equal: Whether they were, within rounding; None where layers that draw at
            random leave it open.
        distances: How far the ends are apart, as a part of the way that one device
            went: "weights", and "slots" of the optimizer where it has some.
        tolerances: What rounding allows of each.
        num_steps: Steps that were made.
    """

    replicas: int
    is_equal: bool | None
    distances: dict[str, float] = dataclasses.field(hash=False)
    tolerances: dict[str, float] = dataclasses.field(hash=False)
    num_steps: int


@dataclasses.dataclass(frozen=True)
class ScalingPoint(Record):
    """The steps of some replicas, against those of one device.

    Args:
        mode: "weak": each replica has the batch of one device; "strong": they share it.
        replicas: How many.
        batch_size: Examples of a step of all replicas together.
        step_seconds: The median over rounds.
        efficiency: Examples a second, over those of one device times the replicas; 1
            is best. 95 % interval.
        communication_share: Part of a step that goes without the reduction, in [0, 1),
            with its interval.
        slow_worker_share: Part of a step for which the others wait for the slowest
            worker; None where all replicas are in one process, which shows no single
            one.
        input_share: Part of a step that would wait for the input.
        reduced_bytes: What each replica hands to the reduction in a step; None where
            shapes do not tell.
        sent_bytes: What each then sends in a ring: 2 * (n - 1) / n of that.
    """

    mode: Mode
    replicas: int
    batch_size: int
    step_seconds: float
    efficiency: Interval
    communication_share: Interval
    slow_worker_share: Interval | None
    input_share: float
    reduced_bytes: int | None
    sent_bytes: int | None


@dataclasses.dataclass(frozen=True)
class OneDevice(Record):
    """What one device says, ahead of any other.

    Args:
        half_share_of_flops: Of `tfamp.prove`: part of the products in half precision.
        causes: Why half precision does not bring more, with the remedy.
        input: Of `tfamp.data.bottleneck`.
        step_seconds: Of a step with a batch in memory; None where nothing was timed.
    """

    half_share_of_flops: float
    causes: tuple[str, ...]
    input: Bottleneck
    step_seconds: float | None = None


class Times(NamedTuple):
    """Seconds of a step in each round, the same rounds everywhere.

    Attributes:
        one: On one device.
        real: On all replicas.
        alone: Without the reduction, by process.
    """

    one: Sequence[float]
    real: Sequence[float]
    alone: Sequence[Sequence[float]]


def efficiency(times: Times, *, gain: float) -> Interval:
    """Returns the examples a second of replicas over those of as many single devices.

    `gain` is what a perfect step would take, in steps of one device: 1 where each of n
    replicas has its batch, 1 / n where they share one.
    """
    ratios = [
        gain * one / real for one, real in zip(times.one, times.real, strict=True)
    ]
    return interval_of_ratios(ratios, _RATE)


def communication_share(times: Times) -> Interval:
    """Returns the part of a step that goes without the reduction, at least 0."""
    slowest = times.alone[slowest_of(times)]
    kept = interval_of_ratios(
        [own / real for own, real in zip(slowest, times.real, strict=True)], _RATE
    )
    return _at_least_0(1 - kept.estimate, 1 - kept.high, 1 - kept.low)


def slow_worker_share(times: Times) -> Interval | None:
    """Returns the part of a step for which the others wait for the slowest worker.

    That is its time beyond the mean of the others; None of one process alone.
    """
    if len(times.alone) < 2:
        return None
    slowest = slowest_of(times)
    others = [each for i, each in enumerate(times.alone) if i != slowest]
    shares = [
        (own - statistics.fmean(rest)) / real
        for own, real, *rest in zip(
            times.alone[slowest], times.real, *others, strict=True
        )
    ]
    found = interval(shares, _RATE)
    return _at_least_0(found.estimate, found.low, found.high)


def _at_least_0(*ends: float) -> Interval:
    return Interval(*(max(0.0, end) for end in ends))


def slowest_of(times: Times) -> int:
    """Returns the worker that takes longest by its mean."""
    means = [statistics.fmean(each) for each in times.alone]
    return means.index(max(means))


def input_share(one: OneDevice, step_seconds: float, *, batches: float) -> float:
    """Returns the part of a step that would wait for the input.

    That is what one device waits already, or, where it is more, what is missing if the
    pipeline of a process has to give `batches` batches of one device in each step.
    """
    needed = batches * one.input.input_seconds
    starved = 1 - step_seconds / needed if needed > step_seconds else 0.0
    return max(one.input.possible_gain, starved)


def sent_bytes(reduced_bytes: int | None, replicas: int) -> int | None:
    """Returns what a replica sends in a ring that adds up so many bytes.

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of
    workstations, 2009.

    Example:
        >>> sent_bytes(1000, 2), sent_bytes(1000, 4)
        (1000, 1500)
    """
    if reduced_bytes is None:
        return None
    return round(2 * (replicas - 1) / replicas * reduced_bytes)


def judge(
    point: ScalingPoint | None,
    equality: Sequence[Equality],
    one: OneDevice,
    *,
    shares_devices: bool,
) -> tuple[Verdict, str]:
    """Returns the verdict on the most replicas, and why.

    `point` is their weak scaling, None where nothing was timed; `equality` that of
    each number of replicas. Where they share devices, efficiency says nothing.
    """
    wrong = [each for each in equality if each.is_equal is False]
    if wrong or point is None:
        worst = wrong[0] if wrong else equality[-1]
        what = max(
            worst.distances,
            key=lambda name: worst.distances[name] / worst.tolerances[name],
        )
        return "not equal", (
            f"After {worst.num_steps} steps the {what} of {worst.replicas} replicas "
            "are "
            f"{format_share(worst.distances[what])} of their way from those of one "
            f"device; rounding allows {format_share(worst.tolerances[what])}. No speed "
            "was measured."
        )
    found = _shares(point, one)
    certain = {n: each.estimate for n, each in found.items() if each.low > MIN_SHARE}
    if certain:
        name = max(certain, key=lambda each: certain[each])
        share = format_share(certain[name])
        return name, f"{share} of a step of {point.replicas} replicas {_GOES[name]}."
    bounds = [
        f"{_WORDS[name]} {format_share(each.low)} to {format_share(each.high)}"
        for name, each in found.items()
        if each.high > MIN_SHARE
    ]
    if bounds:
        return "unclear", (
            f"The noise allows shares of a step on both sides of "
            f"{format_share(MIN_SHARE)}: {join_words(bounds)}."
        )
    least = (
        "The reduction, the slowest worker and the input take less than "
        f"{format_share(MIN_SHARE)} of a step of {point.replicas} replicas each"
    )
    if shares_devices:
        return "scales", f"{least}; what they compute with, they share."
    if point.efficiency.low >= _GOOD_EFFICIENCY:
        share = format_share(point.efficiency.estimate)
        return "scales", f"{least}; each does {share} of what one does alone."
    return "unclear", (
        f"{least}, and yet each does {format_share(point.efficiency.estimate)} of what "
        "one does alone: its own work takes longer beside the others."
    )


def advise(
    verdict: Verdict,
    point: ScalingPoint | None,
    one: OneDevice,
    *,
    is_half: bool,
    has_workers: bool,
) -> tuple[str, ...]:
    """Returns what to change, most promising first.

    `is_half` says whether layers compute in half precision, `has_workers` whether each
    replica is a process of its own.
    """
    found: list[str] = []
    if verdict == "not equal":
        found = [
            "Call `tfamp.enable(policy=...)` before the model is built, or wrap the "
            "optimizer in `tfamp.LossScaleOptimizer`: stock Keras weights uneven parts "
            "of a batch wrongly.",
            "Take a batch that the replicas divide evenly, and look at losses and "
            "train steps of your own: a mean has to be one over the global batch.",
        ]
    if verdict == "communication" and point is not None:
        size = "" if point.sent_bytes is None else format_bytes(point.sent_bytes)
        found = [
            f"Send fewer bytes (each replica sends {size or 'all gradients'} a step): "
            "`tfamp.LossScaleOptimizer(..., reduce_dtype='auto')`"
            + ("." if is_half else ", and a policy of half precision."),
            "Give each replica a larger batch: the bytes stay, the work grows "
            "(`tfamp.find_batch_size` says what fits).",
            "Where memory is full, add up several batches before they are sent: "
            "`tfamp.LossScaleOptimizer(..., gradient_accumulation_steps=4)`.",
        ]
    if verdict == "slow worker":
        found = [
            "Look for what else runs on the slowest worker, and for a GPU that is hot "
            "or shared: `tfamp.callbacks.DeviceStats` and `tfamp doctor` on each.",
            "Give all workers equal devices and equal parts: `Pipeline.shard('auto')`.",
        ]
    if verdict == "input":
        found = [line for line in one.input.advice.splitlines() if line.strip()][:3]
        found.append(
            "Have each worker read its own part: `Pipeline.shard('auto')`."
            if has_workers
            else "One process feeds all replicas; with a process for each, and "
            "`Pipeline.shard('auto')`, each reads its part."
        )
    if is_half and one.half_share_of_flops < 0.5:
        found.append(
            f"Only {format_share(one.half_share_of_flops)} of the products are in half "
            "precision: `tfamp.prove` names the layers."
        )
    return tuple(found)


def _shares(point: ScalingPoint, one: OneDevice) -> dict[Verdict, Interval]:
    """Returns what may hold a step up, as shares of it."""
    found: dict[Verdict, Interval] = {"communication": point.communication_share}
    if point.slow_worker_share is not None:
        found["slow worker"] = point.slow_worker_share
    share = point.input_share
    is_own = share <= one.input.possible_gain
    low = one.input.gain_low if is_own else share
    high = max(share, one.input.gain_high) if is_own else share
    found["input"] = Interval(share, low, high)
    return found


_WORDS = {
    "communication": "the reduction",
    "slow worker": "the slowest worker",
    "input": "the input",
}
_GOES = {
    "communication": "go to adding up gradients",
    "slow worker": "go to waiting for the slowest worker",
    "input": "would wait for the input",
}
