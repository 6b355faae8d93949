"""What `tfamp.measure_policies` found."""

import dataclasses
from typing import Any

from tfamp.records import console, units
from tfamp.records.record import Record, TableRecord

_LEAST_GAIN = 1.05  # of more steps in a call


@dataclasses.dataclass(frozen=True)
class PolicyTime(Record):
    """The time of a training step under one policy.

    The speedup is how many times as long a step in float32 without XLA takes, with the
    ends of its 95 % interval; None where there is nothing to compare.
    """

    policy: str
    jit_compile: bool
    step_seconds: float | None = None  # the median; None where it was not timed
    speedup: tuple[float, float, float] | None = None
    note: str = ""  # why it was not timed

    @property
    def name(self) -> str:
        """Policy and XLA in words."""
        return f"{self.policy} with XLA" if self.jit_compile else self.policy

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Measurement(TableRecord):
    """The policies that were timed on a model's own step, and the fastest."""

    model: str
    times: tuple[PolicyTime, ...]  # float32 without XLA first
    chosen: int  # which of them is best
    reason: str
    seconds: float  # what the whole measurement took
    evidence: dict[str, Any]  # devices, versions, shapes of the batch
    # Steps in a call of TensorFlow, and the seconds of a step of the best policy; empty
    # where a step is too long to gain by it.
    joined: tuple[tuple[int, float], ...] = ()

    @property
    def steps_per_execution(self) -> int:
        """The fewest steps in a call that no other number beats by 5 %."""
        limit = min((each for _, each in self.joined), default=0.0) * _LEAST_GAIN
        return min((n for n, each in self.joined if each <= limit), default=1)

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
            each = [f"{n} {units.format_seconds(s)}" for n, s in self.joined]
            told += (
                f" A step by the number in a call: {', '.join(each)}; best "
                f"steps_per_execution={self.steps_per_execution}."
            )
        return console.text_of(console.table(columns, rows, title=title), told)
