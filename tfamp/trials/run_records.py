"""What one training run under one policy and one seed measured, as records.

Names end in units, `_seconds`, `_bytes`, `_joules`; a field that is None was not
measured.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from tfamp.machine.speeds import Device
from tfamp.records.record import Record


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
    """Bytes that a process held with the model built, and at its peak in training.

    `device_bytes` are those of TensorFlow's allocator on the fullest GPU.
    """

    start_bytes: int
    training_bytes: int | None = None
    device_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class LayerDtype(Record):
    """What a layer computes in."""

    path: str
    compute_dtype: str


@dataclasses.dataclass(frozen=True)
class Run(Record):
    """One training run, in a process of its own."""

    SCHEMA: ClassVar[int] = 4

    policy: str
    seed: int
    status: Literal["finished", "failed"] = "finished"
    error: str = ""
    resolved_policy: str = ""
    reason: str = ""
    batch_size: int = 0
    num_steps: int = 0
    num_epochs: int = 0
    num_parameters: int = 0
    examples_per_second: float = 0.0
    step_seconds: float = 0.0
    first_step_seconds: float = 0.0
    history: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    num_examples: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    skipped_steps: int = 0
    num_nonfinite_weights: int = 0
    latencies: tuple[Latency, ...] = ()
    memory: Memory | None = None
    energy_joules: float | None = None
    layers: tuple[LayerDtype, ...] = ()
    notes: tuple[str, ...] = ()
    outcome: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether it has figures."""
        return self.status == "finished"

    def latency(self, batch_size: int) -> Latency | None:
        """Returns the latency of a batch size, None if it was not measured."""
        found = (each for each in self.latencies if each.batch_size == batch_size)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class Context(Record):
    """The machine and the versions behind the figures, and how to repeat them."""

    devices: tuple[Device, ...]
    versions: dict[str, str | None]
    system: str
    num_cores: int
    command: str = ""
    date: str = ""
