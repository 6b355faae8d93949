"""What `tfamp.measure_policies` found."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfamp.records import console, units
from tfamp.records.record import Record, TableRecord

_LEAST_GAIN = 1.05  # of more steps in a call


@dataclasses.dataclass(frozen=True)
class PolicyTime(Record):
    """The time of a training step under one policy.

    Attributes:
        policy: Name of the policy.
        jit_compile: Whether XLA compiles the step.
        step_seconds: Median over the turns; None where the policy was not timed.
        speedup: Times that a step in float32 without XLA takes as long, with the ends
            of its 95 % interval; None where there is nothing to compare.
        note: Why it was not timed.
    """

    policy: str
    jit_compile: bool
    step_seconds: float | None = None
    speedup: tuple[float, float, float] | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """Policy and XLA in words."""
        return f"{self.policy} with XLA" if self.jit_compile else self.policy

    def __str__(self) -> str:
        return self.name


def best_of(seconds_by_steps: Mapping[int, float]) -> int:
    """Returns the smallest number of steps in a call that none beats by 5 %.

    Example:
        >>> best_of({1: 3.0, 8: 1.02, 32: 1.0}), best_of({})
        (8, 1)
    """
    limit = min(seconds_by_steps.values(), default=0.0) * _LEAST_GAIN
    fast = [n for n, each in seconds_by_steps.items() if each <= limit]
    return min(fast, default=1)


@dataclasses.dataclass(frozen=True)
class Measurement(TableRecord):
    """The policies that were timed on a model's own step, and the fastest.

    Attributes:
        model: The model's name.
        times: Each candidate, float32 without XLA first.
        chosen: Which of `times` is best.
        reason: Why, in one line.
        seconds: What the whole measurement took.
        evidence: Devices, versions, shapes of the batch.
        joined: The number of steps in a call of TensorFlow, and the seconds of a step
            of the best policy; empty where a step is too long to gain by it.
    """

    model: str
    times: tuple[PolicyTime, ...]
    chosen: int
    reason: str
    seconds: float
    evidence: dict[str, Any]
    joined: tuple[tuple[int, float], ...] = ()

    @property
    def steps_per_execution(self) -> int:
        """The fewest steps in a call that no other number beats by 5 %."""
        return best_of(dict(self.joined))

    @property
    def best(self) -> PolicyTime:
        """The fastest candidate, or float32 where none was shown to be faster."""
        return self.times[self.chosen]

    def table(self) -> str:
        """Returns a row for each candidate and the reason for the best."""
        columns = {
            "policy": {},
            "step": console.RIGHT,
            "speed over float32": console.RIGHT,
            "note": {**console.FOLD, "ratio": 1},
        }
        rows = []
        for place, time in enumerate(self.times):
            step = ratio = "-"
            if time.step_seconds is not None:
                step = units.format_seconds(time.step_seconds)
            if time.speedup is not None:
                ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*time.speedup)
            note = "best" if place == self.chosen else time.note
            rows.append((time.name, step, ratio, note))
        title = f"Steps of {self.model}"
        told = self.reason
        if self.joined:
            each = ", ".join(
                f"{steps} {units.format_seconds(seconds)}"
                for steps, seconds in self.joined
            )
            told += (
                f" A step by the number in a call: {each}; best "
                f"steps_per_execution={self.steps_per_execution}."
            )
        return console.text_of(console.table(columns, rows, title=title), told)
