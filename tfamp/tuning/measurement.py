"""What `tfamp.measure_policies` found."""

import dataclasses
from typing import Any

from tfamp.records import console, units
from tfamp.records.record import Record, TableRecord


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
    """

    model: str
    times: tuple[PolicyTime, ...]
    chosen: int
    reason: str
    seconds: float
    evidence: dict[str, Any]

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
        return console.text_of(console.table(columns, rows, title=title), self.reason)
