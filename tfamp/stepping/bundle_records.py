"""`bundle.json`, whose fields docs/bundles.md describes, and what replays give."""

import dataclasses
import hashlib
import json
import math
from typing import Any, ClassVar, Literal

from tfamp.loss_scale.interface import found_in
from tfamp.machine.speeds import Device
from tfamp.records.record import Record, TableRecord

Cause = Literal["loss", "weights", "skip", "error"]


@dataclasses.dataclass(frozen=True)
class ReplayedStep(Record):
    """A call of the training function, then and now.

    Args:
        epoch: Its epoch, from 0.
        step: Batches drawn in the `fit` up to and with it.
        recorded_loss: The loss that `fit` logged, a mean over the epoch so far; None
            where the call raised or logged none.
        replayed_loss: The same, now.
        differing: Names of the logs that differ in a bit.
    """

    epoch: int
    step: int
    recorded_loss: float | None
    replayed_loss: float | None
    differing: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Replayed(TableRecord):
    """What came of replaying a bundle; `print` shows it.

    Args:
        path: The bundle.
        cause: What was seen then: "loss", "weights", "skip" or "error".
        message: It in a sentence.
        failed_again: Whether the same was seen now.
        is_exact: Whether every log and every variable afterwards has the same bits;
            None where the bundle has no way to tell.
        is_same_device: Whether devices and versions are those of the bundle.
        steps: The calls that were replayed, the failing one last.
        differences: What was otherwise, a line each.
        notes: What a reader should know.
        triage: What `tfamp.triage` says of the failing step; empty where it was not
            asked.

    Example:
        >>> done = Replayed("b", "loss", "The loss is nan.", True, True, True, ())
        >>> done.is_reproduced, done.verdict
        (True, 'Reproduced: the step fails as it did, bit by bit.')
    """

    path: str
    cause: str
    message: str
    failed_again: bool
    is_exact: bool | None
    is_same_device: bool
    steps: tuple[ReplayedStep, ...]
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    triage: str = ""

    @property
    def is_reproduced(self) -> bool:
        """Whether the step failed again, with the same bits where that is to be had."""
        return self.failed_again and (
            self.is_exact is not False or not self.is_same_device
        )

    @property
    def verdict(self) -> str:
        """What came of it, in a sentence."""
        if not self.failed_again:
            return "Not reproduced: the step does not fail now."
        if self.is_exact:
            return "Reproduced: the step fails as it did, bit by bit."
        if self.is_exact is None:
            return "Reproduced: the step fails again; there are no bits to compare."
        if self.is_same_device:
            return "Not reproduced: the step fails again, but not bit by bit."
        return "Reproduced: the step fails again, on another device with other bits."

    def table(self) -> str:
        """Returns all of it as text."""
        lines = [f"{self.path}: {self.message}", "", self.verdict, ""]
        lines.append(f"{'epoch':>5} {'step':>8} {'loss then':>16} {'loss now':>16}")
        for step in self.steps:
            same = f"  differs: {', '.join(step.differing)}" if step.differing else ""
            lines.append(
                f"{step.epoch:>5} {step.step:>8} {_loss_text(step.recorded_loss):>16} "
                f"{_loss_text(step.replayed_loss):>16}{same}"
            )
        lines += [""] if self.differences or self.notes else []
        lines += [f"- {line}" for line in (*self.differences, *self.notes)]
        lines += ["", self.triage] if self.triage else []
        return "\n".join(lines)


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.9g}"


@dataclasses.dataclass(frozen=True)
class Call(Record):
    """One call of the training function: a step, or `steps_per_execution` of them.

    Numbers of `logs` are as `float.hex` writes them, so that no bit is lost; there are
    none where the call raised.

    Example:
        >>> call = Call(epoch=0, index=2, first=2, num_batches=1, logs=hexed({"a": 1}))
        >>> call.logs["a"], call.value("a"), call.value("loss")
        ('0x1.0000000000000p+0', 1.0, None)
    """

    epoch: int
    index: int
    first: int
    num_batches: int
    logs: dict[str, str]

    def value(self, name: str) -> float | None:
        """Returns a number of the logs, None where it is not there."""
        text = self.logs.get(name)
        return None if text is None else float.fromhex(text)


@dataclasses.dataclass(frozen=True)
class Batch(Record):
    """Where the tensors of a kept batch are, and what they are packed into."""

    number: int
    num_bytes: int
    parts: tuple[dict[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Surroundings(Record):
    """Where and how the model trained; 0 `threads` are TensorFlow's own choice."""

    policy: str
    is_managed: bool
    assignment: dict[str, Any]
    strategy: str
    replicas: tuple[str, ...]
    steps_per_execution: int
    jit_compile: bool
    run_eagerly: bool
    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    environment: dict[str, str]
    threads: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Bundle(Record):
    """A failing step and what led to it; docs/bundles.md says what each field is."""

    SCHEMA: ClassVar[int] = 1

    cause: Cause
    message: str
    error: str | None
    epoch: int
    step: int
    calls: tuple[Call, ...]
    batches: tuple[Batch, ...]
    state_step: int
    leads: bool
    digest: str | None
    counters: dict[str, int | float]
    learning_rate: float | None
    state_learning_rate: float | None
    model_class: str
    classes: dict[str, str]
    has_model: bool
    needs_build: str
    surroundings: Surroundings
    notes: tuple[str, ...] = ()
    checksum: str = ""

    def computed_checksum(self) -> str:
        """Returns the checksum of all fields but `checksum`."""
        fields = dataclasses.replace(self, checksum="").to_dict()
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def failing(self) -> Call | None:
        """The failing call, None where none of its batches is kept."""
        return self.calls[-1] if self.calls else None


def error_name(error: BaseException) -> str:
    """Returns the class of an error, as `fit` raises it.

    Example:
        >>> error_name(ZeroDivisionError("by zero"))
        'ZeroDivisionError'
    """
    return "LossScaleError" if found_in(str(error)) else type(error).__name__


def hexed(logs: Any) -> dict[str, str]:
    """Returns the numbers of `fit`'s logs as texts that hold every bit."""
    found = {}
    for name, value in dict(logs or {}).items():
        try:
            found[str(name)] = float(value).hex()
        except (TypeError, ValueError):
            continue  # what is no number is no log that can be compared
    return found


def same_bits(one: str, other: str) -> bool:
    """Returns whether two texts of `hexed` are the same number; NaN equals NaN."""
    return one == other or (
        math.isnan(float.fromhex(one)) and math.isnan(float.fromhex(other))
    )
