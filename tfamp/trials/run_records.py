"""What one training run under one policy and one seed measured, as records."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from tfamp.machine.speeds import Device
from tfamp.records.record import Record

# More points than this a curve does not show.
MAX_POINTS = 400


@dataclasses.dataclass(frozen=True)
class Spread(Record):
    """The middle of measured values and how far they scatter.

    Args:
        median: The middle.
        low: A quarter of the values lie below.
        high: A quarter lie above.
        count: How many there were.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Returns the spread of at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.5, high=2.5, count=3)
        """
        low, median, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
        return cls(float(median), float(low), float(high), len(values))


@dataclasses.dataclass(frozen=True)
class Latency(Record):
    """How long one call of the trained model takes, for one batch size.

    Args:
        batch_size: Examples in the call.
        p50_seconds: Half of the calls took at most so long.
        p90_seconds: Nine of ten.
        p99_seconds: Ninety-nine of a hundred; the longest where there were fewer.
        examples_per_second: Of all calls together.
        num_calls: How many were timed.
    """

    batch_size: int
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    examples_per_second: float
    num_calls: int

    @classmethod
    def of(cls, batch_size: int, seconds: Sequence[float]) -> "Latency":
        """Returns the latency from the seconds of each call.

        Example:
            >>> Latency.of(8, [0.1, 0.2, 0.1]).p50_seconds
            0.1
        """
        p50, p90, p99 = np.percentile(
            np.asarray(seconds, np.float64), (50, 90, 99), method="higher"
        )
        rate = batch_size * len(seconds) / sum(seconds)
        return cls(
            batch_size, float(p50), float(p90), float(p99), float(rate), len(seconds)
        )


@dataclasses.dataclass(frozen=True)
class Memory(Record):
    """Bytes that a run held.

    Args:
        start_bytes: Of a fresh process with libraries and two batches of the data,
            without the model's weights.
        training_bytes: The most that it held in a few training steps. Of the first
            seed; None for others.
        inference_bytes: The most that it held in calls before those steps, likewise;
            None, too, where the system cannot begin to count anew.
        device_bytes: The most that TensorFlow's allocator gave out on a GPU during
            training; None without one.
        device_used_bytes: The most that NVML saw in use on it, all programs together.
    """

    start_bytes: int
    training_bytes: int | None = None
    inference_bytes: int | None = None
    device_bytes: int | None = None
    device_used_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class LayerDtype(Record):
    """What a layer computes in, and what decided it.

    Args:
        path: As `tfamp.assignment` names it.
        class_name: Its class.
        compute_dtype: What it computes in.
        variable_dtype: What its weights are stored in.
        rule: What decided.
    """

    path: str
    class_name: str
    compute_dtype: str
    variable_dtype: str
    rule: str


@dataclasses.dataclass(frozen=True)
class Run(Record):
    """One training run, in a process of its own.

    Args:
        policy: As it was asked for, such as "auto" or "float32+xla".
        seed: Of weights, data order and dropout.
        status: "failed" if an error ended it; then only `error` says anything.
        error: Why it failed, "" if it did not.
        resolved_policy: What "auto" came to.
        reason: Why that policy.
        batch_size: Examples in a training step.
        num_steps: Training steps of all epochs.
        num_epochs: Passes over the training data.
        num_parameters: Trainable and other weights of the model.
        examples_per_second: In training, without the steps of the warm-up and the
            slowest and fastest twentieth of the others.
        step: Seconds of a training step, likewise.
        warmup_steps: Steps at the start that are left out of both.
        build_seconds: From the call of the building function to the model and data.
        first_step_seconds: From there to the end of the first training step: tracing,
            compiling and one step.
        history: Metrics after each epoch, as `fit` names them.
        final_metrics: Of the validation data after the last epoch, without "val_";
            of the training data where there is no validation data.
        num_examples: Examples that those were taken on, 0 if unknown.
        losses: Step and training loss (its mean since the step before, in order).
        loss_scales: Step and loss scale from there on; empty where nothing is scaled.
        skipped_steps: Steps whose gradients were not finite.
        num_nonfinite_weights: NaN and inf in the weights at the end.
        latencies: Of the trained model, one for each batch size.
        memory: Bytes that it held; None where it failed.
        energy_joules: Of the GPU during training; None where NVML does not tell.
        file_bytes: Of the saved model; None where it cannot be saved.
        layers: The dtypes of each layer.
        notes: What a reader should know, one sentence each.
    """

    SCHEMA: ClassVar[int] = 2

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
    step: Spread | None = None
    warmup_steps: int = 0
    build_seconds: float = 0.0
    first_step_seconds: float = 0.0
    history: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    num_examples: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    loss_scales: tuple[tuple[int, float], ...] = ()
    skipped_steps: int = 0
    num_nonfinite_weights: int = 0
    latencies: tuple[Latency, ...] = ()
    memory: Memory | None = None
    energy_joules: float | None = None
    file_bytes: int | None = None
    layers: tuple[LayerDtype, ...] = ()
    notes: tuple[str, ...] = ()

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
    """The machine, the versions and the settings behind the figures.

    Args:
        devices: What TensorFlow computed on.
        driver: The GPU's driver, "" without one.
        versions: Package -> version.
        system: Operating system and Python, as text.
        num_cores: Processor cores that the process may use.
        intra_op_threads: Threads of one operation; 0 leaves it to TensorFlow.
        inter_op_threads: Operations at a time; 0 likewise.
        tf32: Whether float32 products may round to TF32 (on GPUs that can).
        onednn: Whether TensorFlow's oneDNN kernels are on.
        variables: The environment variables that matter and are set.
        command: How to measure it again.
        date: The day of the first run, as 2026-01-31 in UTC.
    """

    devices: tuple[Device, ...]
    driver: str
    versions: dict[str, str | None]
    system: str
    num_cores: int
    intra_op_threads: int
    inter_op_threads: int
    tf32: bool
    onednn: bool
    variables: dict[str, str]
    command: str = ""
    date: str = ""
