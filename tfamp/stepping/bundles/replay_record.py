"""What came of replaying a bundle."""

import dataclasses

from tfamp.records.record import Record


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
class Replayed(Record):
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
                f"{step.epoch:>5} {step.step:>8} {_shown(step.recorded_loss):>16} "
                f"{_shown(step.replayed_loss):>16}{same}"
            )
        lines += [""] if self.differences or self.notes else []
        lines += [f"- {line}" for line in (*self.differences, *self.notes)]
        lines += ["", self.triage] if self.triage else []
        return "\n".join(lines)

    def __str__(self) -> str:
        """Returns `table()`."""
        return self.table()


def _shown(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.9g}"
