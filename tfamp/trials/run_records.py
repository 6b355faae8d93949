"""What a trial is asked and what it measured, as records; None was not measured."""

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from tfamp.machine.speeds import Device
from tfamp.records.record import Record


def file_name(policy: str, seed: int) -> str:
    """Returns what a run's files are called, without their ending."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '-', policy)}_seed{seed}"


def possible_size(size: int, replicas: int, num_examples: int | None) -> int:
    """Returns a batch size as replicas and the examples there are allow it."""
    return -(-min(size, num_examples or size) // replicas) * replicas


@dataclasses.dataclass(frozen=True)
class Task(Record):
    """What one process does: a whole training, or a few steps of one batch size."""

    policy: str  # as `Variant` reads it
    seed: int = 0  # of weights, data order and dropout
    epochs: int = 1
    batch_size: int | None = None  # of arrays, or what is tried
    steps: int = 0  # a few, at least so many; 0 trains whole
    allowed_bytes: int | None = None  # what it may hold
    target_batch_size: int | None = None  # examples of one update
    data_batch_size: int | None = None  # None where only the process knows it
    num_examples: int | None = None  # of the data

    @property
    def name(self) -> str:
        """What its files are called, without their ending."""
        steps = f"_batch{self.batch_size}" if self.steps else ""
        return file_name(self.policy, self.seed) + steps


@dataclasses.dataclass(frozen=True)
class Latency(Record):
    """How long one call of the trained model takes, for one batch size."""

    batch_size: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    examples_per_second: float
    num_calls: int

    @classmethod
    def of(cls, batch_size: int, seconds: Sequence[float]) -> "Latency":
        """Returns the latency from the seconds of each call."""
        values = np.asarray(seconds, np.float64)
        p50, p90, p99 = np.percentile(values, (50, 90, 99), method="higher").tolist()
        rate = batch_size * len(values) / float(values.sum())
        return cls(batch_size, p50, p90, p99, rate, len(values))


@dataclasses.dataclass(frozen=True)
class Memory(Record):
    """Bytes that a process held with the model built, and at its peak in training."""

    start_bytes: int
    training_bytes: int | None = None
    device_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Run(Record):
    """One training run, in a process of its own."""

    SCHEMA: ClassVar[int] = 6

    policy: str
    seed: int
    status: Literal["finished", "failed"] = "finished"
    error: str = ""
    resolved_policy: str = ""
    reason: str = ""
    model: str = ""  # its name, once it is built
    replicas: int = 1  # that share a batch
    batch_size: int = 0
    data_batch_size: int | None = None
    num_steps: int = 0
    num_epochs: int = 0
    num_parameters: int = 0
    examples_per_second: float = 0.0
    step_seconds: float = 0.0
    first_step_seconds: float = 0.0
    history: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    num_examples: int = 0  # that the final metrics are of, else of the data
    losses: tuple[tuple[int, float], ...] = ()
    skipped_steps: int = 0
    num_nonfinite_weights: int = 0
    latencies: tuple[Latency, ...] = ()
    memory: Memory | None = None
    energy_joules: float | None = None
    layers: dict[str, str] = dataclasses.field(default_factory=dict)  # compute dtypes
    notes: tuple[str, ...] = ()
    outcome: str = ""  # of a few steps, whether they fit; how a process ended

    @property
    def is_finished(self) -> bool:
        """Whether it has figures."""
        return self.status == "finished"

    @property
    def fits(self) -> bool:
        """Whether a few steps ended and stayed within the limit."""
        return self.outcome == "fits"

    @property
    def peak_bytes(self) -> int | None:
        """The most that the process held, on a GPU TensorFlow; None if unknown."""
        found = self.memory
        return None if found is None else found.device_bytes or found.training_bytes


@dataclasses.dataclass(frozen=True)
class Context(Record):
    """The machine and the versions behind the figures, and how to repeat them."""

    devices: tuple[Device, ...]
    versions: dict[str, str | None]
    system: str
    num_cores: int
    command: str = ""
    date: str = ""
