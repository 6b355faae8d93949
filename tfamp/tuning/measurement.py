"""What `tfamp.measure_policies` found."""

import dataclasses
import os
from typing import Any

import tensorflow as tf

import tfamp
from tfamp.machine import devices
from tfamp.records import console, units
from tfamp.records.record import Record, TableRecord
from tfamp.records.versions import installed_versions


def with_xla(policy: str, jit_compile: bool) -> str:
    """Returns policy and XLA in words."""
    return f"{policy} with XLA" if jit_compile else policy


@dataclasses.dataclass(frozen=True)
class PolicyTime(Record):
    """The time of a training step under one policy.

    Attributes:
        policy: Name of the policy.
        jit_compile: Whether XLA compiles the step.
        step_seconds: Median over the turns; None where the policy was not timed.
        speedup: Times that a step in float32 without XLA takes as long, with the ends
            of its 95 % interval; None where there is nothing to compare.
        prepare_seconds: What tracing, compiling and the first steps took.
        note: Why it was not timed, or what to know of it.
    """

    policy: str
    jit_compile: bool
    step_seconds: float | None = None
    speedup: tuple[float, float, float] | None = None
    prepare_seconds: float = 0.0
    note: str = ""

    @property
    def name(self) -> str:
        """Policy and XLA in words."""
        return with_xla(self.policy, self.jit_compile)

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
        num_steps: Steps that were run in turns.
        seconds: What the whole measurement took.
        is_clear: Whether it ended as the order was clear, not as the budget was spent.
        evidence: Devices, versions, threads, shapes of the batch.
    """

    model: str
    times: tuple[PolicyTime, ...]
    chosen: int
    reason: str
    num_steps: int
    seconds: float
    is_clear: bool
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
            "prepared in": console.RIGHT,
            "note": {**console.FOLD, "ratio": 1},
        }
        rows = []
        for place, time in enumerate(self.times):
            step = ratio = "-"
            if time.step_seconds is not None:
                step = units.format_seconds(time.step_seconds)
            if time.speedup is not None:
                ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*time.speedup)
            prepared = units.format_seconds(time.prepare_seconds)
            notes = ["best"] * (place == self.chosen) + [time.note] * bool(time.note)
            rows.append((time.name, step, ratio, prepared, "; ".join(notes)))
        title = f"Steps of {self.model}"
        return console.text_of(console.table(columns, rows, title=title), self.reason)


def evidence_for(batch: Any) -> dict[str, Any]:
    """Returns what a measurement on a batch holds for, as plain JSON values."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    return {
        "devices": [device.name for device in devices.devices()],
        "versions": {**installed_versions(), "tfamp": tfamp.__version__},
        "threads": [
            tf.config.threading.get_intra_op_parallelism_threads(),
            os.cpu_count(),
        ],
        "batch": [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves],
    }
