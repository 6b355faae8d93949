"""What a search for the batch size found: trials, choice, advice."""

import dataclasses
from typing import Literal

from tfamp.machine.limits import MemoryLimit
from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_rate, format_seconds

Outcome = Literal["fits", "over the limit", "out of memory", "killed", "too slow"]
StoppedBy = Literal[
    "memory", "knee", "time", "max_batch_size", "target_batch_size", "data"
]
_WHY = {
    "memory": "a larger one does not fit",
    "knee": "doubling it twice gains too little",
    "time": "a larger one takes too long to try",
    "max_batch_size": "`max_batch_size` allows no more",
    "target_batch_size": "`target_batch_size` asks for no more",
    "data": "a larger one would be more than half of the data",
}


@dataclasses.dataclass(frozen=True)
class Trial(Record):
    """Training steps of one batch size in a process of their own."""

    batch_size: int  # examples of a step, on all replicas
    outcome: Outcome
    examples_per_second: float | None = None
    step_seconds: float | None = None  # the median
    peak_bytes: int | None = None  # of the process, on a GPU of TensorFlow there
    # Whether the model was built; where not, no other size is worth a trial.
    began_training: bool = True
    detail: str = ""  # what the process said of its end

    @property
    def fits(self) -> bool:
        """Whether the steps ended and stayed within the limit."""
        return self.outcome == "fits"

    def row(self) -> tuple[str, ...]:
        """Returns batch size, examples/s, step, peak memory and outcome as text."""
        speed, step = self.examples_per_second, self.step_seconds
        return (
            f"{self.batch_size:,}",
            "" if speed is None else format_rate(speed).removesuffix(" examples/s"),
            "" if step is None else format_seconds(step),
            "" if self.peak_bytes is None else format_bytes(self.peak_bytes),
            self.outcome,
        )


@dataclasses.dataclass(frozen=True)
class BatchSearch(TableRecord):
    """The batch size that trains fastest within the memory there is."""

    model: str
    policy: str
    batch_size: int  # examples of a step, on all replicas; it was tried and fits
    gradient_accumulation_steps: int  # steps of one update
    trials: tuple[Trial, ...]  # in the order they were tried
    stopped_by: StoppedBy  # what ended the growth
    limit: MemoryLimit | None  # of a process; None where nothing was known
    allowed_bytes: int | None  # what of it a trial may take
    replicas: int = 1
    data_batch_size: int | None = None  # examples of a batch of the data
    target_batch_size: int | None = None  # examples of one update, as asked for

    @property
    def accumulation_steps(self) -> int:
        """`gradient_accumulation_steps`, by the short name that our optimizer takes."""
        return self.gradient_accumulation_steps

    @property
    def effective_batch_size(self) -> int:
        """Examples of one update."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def chosen(self) -> Trial:
        """The trial of the size that was chosen."""
        fitting = [t for t in self.trials if t.fits and t.batch_size == self.batch_size]
        return fitting[-1]

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change in the training script, one sentence or two each."""
        each = ""
        if self.replicas > 1:
            part = self.batch_size // self.replicas
            each = f" ({part:,} on each of {self.replicas} replicas)"
        lines = [
            f"Make batches of {self.batch_size:,}{each}, as by "
            f"`.batch({self.batch_size})`."
        ]
        steps, effective = self.gradient_accumulation_steps, self.effective_batch_size
        if steps > 1:
            target = self.target_batch_size
            rest = "" if target == effective else f", not {target:,}"
            lines.append(
                f"Add up {steps} of them to one update of {effective:,} examples{rest}"
                ": `tfamp.LossScaleOptimizer(optimizer, "
                f"gradient_accumulation_steps={steps})`."
            )
        base = self.data_batch_size
        if base is not None and base != effective:
            lines.append(
                f"The learning rate belongs to updates of {base:,} examples. Take "
                "`tfamp.training.scale_learning_rate(learning_rate, batch_size="
                f'{effective}, base_batch_size={base})`, with `rule="sqrt"` for Adam.'
            )
        return tuple(lines)

    def table(self) -> str:
        """Returns the choice and why, the trials by batch size, and the advice."""
        title = f"{self.model}, {self.policy}"
        if self.limit is not None and self.allowed_bytes is not None:
            title += f"; limit {format_bytes(self.allowed_bytes)}: {self.limit.source}"
        columns = dict.fromkeys(
            ("batch size", "examples/s", "step", "peak memory"), console.RIGHT
        )
        rows = []
        for trial in sorted(self.trials, key=lambda trial: trial.batch_size):
            *figures, outcome = trial.row()
            rows.append((*figures, outcome + ", chosen" * (trial is self.chosen)))
        shown = console.table({**columns, "outcome": console.FOLD}, rows)
        lines = [
            *console.wrapped(f"Batch size {self.batch_size:,}: {self._why()}."),
            *console.wrapped(title),
            console.text_of(shown),
        ]
        for sentence in self.advice:
            lines += console.wrapped(f"- {sentence}", indent=2)
        return "\n".join(lines)

    def _why(self) -> str:
        most = max(trial.batch_size for trial in self.trials if trial.fits)
        is_smaller = self.batch_size < most and not self.target_batch_size
        if is_smaller and self.stopped_by != "knee":
            return f"of those up to {most:,} none is much faster"
        return _WHY[self.stopped_by]
