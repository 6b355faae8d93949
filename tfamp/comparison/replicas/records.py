"""The record of a measurement: what more replicas bring, and why not more."""

import dataclasses
from typing import Literal

from tfamp.records.record import Record
from tfamp.stepping.input_waits.record import Bottleneck
from tfamp.trials.intervals import Interval

Kind = Literal["logical CPUs", "GPUs", "workers"]
Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")
Verdict = Literal[
    "scales", "communication", "input", "slow worker", "not equal", "unclear"
]


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


@dataclasses.dataclass(frozen=True)
class Findings(Record):
    """What was measured of some replicas, and what it comes to.

    Args:
        model: The model's name.
        policy: What it computes in.
        kind: What the replicas were: "logical CPUs" or "GPUs" of one process, or
            "workers", a process each on this host.
        devices: Their names.
        shares_devices: Whether replicas share what they compute with, as logical CPUs
            do: then efficiency says nothing of devices of their own.
        batch_size: Examples of a step on one device.
        verdict: "scales"; "communication", "input" or "slow worker", what costs most;
            "not equal" where the first steps are not those of one device; "unclear".
        reason: Why, in a sentence.
        advice: What to change, most promising first.
        one_device: What one device says.
        equality: Of each number of replicas.
        points: Of each number of replicas, strong and weak; none where the steps are
            not equal, as their speed is then worth nothing.
        rounds: Turns that each step had.
        notes: What else a reader should know.
        versions: Of Python's packages.
    """

    model: str
    policy: str
    kind: Kind
    devices: tuple[str, ...]
    shares_devices: bool
    batch_size: int
    verdict: Verdict
    reason: str
    advice: tuple[str, ...]
    one_device: OneDevice
    equality: tuple[Equality, ...]
    points: tuple[ScalingPoint, ...]
    rounds: int = 0
    notes: tuple[str, ...] = ()
    versions: dict[str, str | None] = dataclasses.field(
        default_factory=dict, hash=False
    )

    @property
    def judged(self) -> ScalingPoint | None:
        """The weak scaling of the most replicas, which the verdict is about."""
        weak = self.of_mode("weak")
        return weak[-1] if weak else None

    @property
    def efficiency(self) -> float | None:
        """Of the most replicas with a batch each; None where nothing was timed."""
        return None if self.judged is None else self.judged.efficiency.estimate

    @property
    def communication_share(self) -> float | None:
        """Of the same steps: the part that goes without the reduction."""
        if self.judged is None:
            return None
        return self.judged.communication_share.estimate

    @property
    def input_share(self) -> float | None:
        """Of the same steps: the part that would wait for the input."""
        return None if self.judged is None else self.judged.input_share

    def of_mode(self, mode: Mode) -> tuple[ScalingPoint, ...]:
        """Returns the points of strong or of weak scaling, fewest replicas first."""
        return tuple(point for point in self.points if point.mode == mode)
