"""What a search for the batch size found: trials, choice, advice."""

import dataclasses
from typing import Literal

from tfamp.machine.limits import MemoryLimit
from tfamp.records import console
from tfamp.records.record import Record
from tfamp.records.units import format_bytes, format_rate, format_seconds, format_share

Outcome = Literal[
    "fits",
    "over the limit",
    "ResourceExhaustedError",
    "XLA out of memory",
    "MemoryError",
    "out of memory",
    "killed",
    "too slow",
]
StoppedBy = Literal[
    "memory", "knee", "time", "max_batch_size", "target_batch_size", "data"
]
_WHY = {
    "memory": "a larger one does not fit",
    "time": "a larger one takes too long to try",
    "max_batch_size": "`max_batch_size` allows no more",
    "target_batch_size": "`target_batch_size` asks for no more",
    "data": "a larger one would be more than half of the data",
}


@dataclasses.dataclass(frozen=True)
class Trial(Record):
    """Training steps of one batch size in processes of their own.

    Args:
        batch_size: Examples of a step, on all replicas.
        outcome: "fits", or how it ended.
        examples_per_second: By the median step; None where it did not fit.
        step_seconds: Median of the timed steps.
        first_step_seconds: The first one, in which TensorFlow traces and compiles.
        peak_bytes: The most memory that was held: by the process, on a GPU by
            TensorFlow's allocator there. Where the trial was ended for it, the memory
            held then; None where it is not known.
        began_training: Whether the model was built and the first step begun; where not,
            no other size is worth a trial.
        detail: What the process said of its end, "" where it fits.
    """

    batch_size: int
    outcome: Outcome
    examples_per_second: float | None = None
    step_seconds: float | None = None
    first_step_seconds: float | None = None
    peak_bytes: int | None = None
    began_training: bool = True
    detail: str = ""

    @property
    def fits(self) -> bool:
        """Whether the steps ended and stayed within the limit."""
        return self.outcome == "fits"


@dataclasses.dataclass(frozen=True)
class BatchSearch(Record):
    """The batch size that trains fastest within the memory there is.

    Args:
        model: The model's name.
        policy: What it was built under.
        batch_size: Examples of a step, on all replicas; it was tried and fits.
        accumulation_steps: Steps of one update.
        trials: All that were tried, in this order.
        stopped_by: What ended the growth: "memory", "knee" (more gained too little),
            "time" (a trial took too long), "max_batch_size", "target_batch_size", or
            "data" (half of it is no larger).
        largest_that_fits: Of those tried, where memory or time ended the growth; None
            where the limit was not met.
        limit: Memory that a process may take; None where nothing was known.
        margin: Part of the limit that has to stay free.
        min_gain: Part by which a doubled batch has to be faster; None where speed did
            not matter.
        replicas: Devices that share a batch.
        data_batch_size: Examples of a batch of the data, for arrays what `fit` takes.
        target_batch_size: Examples of one update that were asked for, or None.
    """

    model: str
    policy: str
    batch_size: int
    accumulation_steps: int
    trials: tuple[Trial, ...]
    stopped_by: StoppedBy
    largest_that_fits: int | None
    limit: MemoryLimit | None
    margin: float
    min_gain: float | None
    replicas: int = 1
    data_batch_size: int | None = None
    target_batch_size: int | None = None

    @property
    def gradient_accumulation_steps(self) -> int:
        """`accumulation_steps`, by the name that optimizers have for it."""
        return self.accumulation_steps

    @property
    def per_replica_batch_size(self) -> int:
        """Examples of a step on each replica."""
        return self.batch_size // self.replicas

    @property
    def effective_batch_size(self) -> int:
        """Examples of one update."""
        return self.batch_size * self.accumulation_steps

    @property
    def chosen(self) -> Trial:
        """The trial of the size that was chosen."""
        fitting = [t for t in self.trials if t.fits and t.batch_size == self.batch_size]
        return fitting[-1]

    @property
    def allowed_bytes(self) -> int | None:
        """The limit without the margin; None where there is no limit."""
        return allowed_bytes(self.limit, self.margin)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change in the training script, one sentence or two each."""
        lines = [
            f"Make batches of {self._batches()}, as by `.batch({self.batch_size})`."
        ]
        steps, effective = self.accumulation_steps, self.effective_batch_size
        if steps > 1:
            keras_way = (
                f", or Keras's own `gradient_accumulation_steps={steps}`"
                if self.replicas == 1
                else ""
            )
            lines.append(
                f"Add up {steps} of them to one update of {effective:,} examples: "
                "`tfamp.LossScaleOptimizer(optimizer, "
                f"gradient_accumulation_steps={steps})`{keras_way}."
            )
        if self.target_batch_size not in (None, effective):
            lines.append(
                f"An update then has {effective:,} examples, not "
                f"{self.target_batch_size:,}: no batch that fits goes into that evenly."
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
        """Returns the trials by batch size, as a table of at most 110 columns."""
        limit = ""
        if self.limit is not None and self.allowed_bytes is not None:
            limit = (
                f"; limit {format_bytes(self.allowed_bytes)}: {self.limit.source}, "
                f"{format_bytes(self.limit.free_bytes)} less "
                f"{format_share(self.margin)}"
            )
        columns = dict.fromkeys(
            ("batch size", "examples/s", "step", "peak memory"), console.RIGHT
        )
        trials = sorted(self.trials, key=lambda trial: trial.batch_size)
        rows = map(self._row, trials)
        shown = console.table({**columns, "outcome": console.FOLD}, rows)
        title = console.wrapped(f"{self.model}, {self.policy}{limit}")
        return "\n".join([*title, console.text_of(shown)])

    def __str__(self) -> str:
        """Returns the choice and why, the trials, and the advice."""
        lines = [*console.wrapped(self._choice()), self.table()]
        for sentence in self.advice:
            lines += console.wrapped(f"- {sentence}", indent=2)
        return "\n".join(lines)

    def _choice(self) -> str:
        chosen = self.chosen
        text = f"Batch size {self._batches()}"
        if self.accumulation_steps > 1:
            text += f" in {self.accumulation_steps} steps an update"
        text += f": {format_rate(chosen.examples_per_second or 0.0)}"
        if chosen.peak_bytes is not None:
            text += f", peak {format_bytes(chosen.peak_bytes)}"
        most = max(trial.batch_size for trial in self.trials if trial.fits)
        # Where speed did not matter the largest that fits was taken.
        gain = format_share(self.min_gain or 0.0)
        if self.stopped_by == "knee":
            why = f"doubling it twice gains less than {gain} each"
        elif self.batch_size < most and not self.target_batch_size:
            why = f"of those up to {most:,} none is more than {gain} faster"
        else:
            why = _WHY[self.stopped_by]
        return f"{text}; {why}."

    def _batches(self) -> str:
        text = f"{self.batch_size:,}"
        if self.replicas > 1:
            each = f"{self.per_replica_batch_size:,}"
            text += f" ({each} on each of {self.replicas} replicas)"
        return text

    def _row(self, trial: Trial) -> tuple[str, ...]:
        outcome: str = trial.outcome
        if trial is self.chosen:
            outcome = "fits, chosen"
        elif trial.batch_size == self.largest_that_fits:
            outcome = "fits, the largest"
        speed, step = trial.examples_per_second, trial.step_seconds
        return (
            f"{trial.batch_size:,}",
            "" if speed is None else format_rate(speed).removesuffix(" examples/s"),
            "" if step is None else format_seconds(step),
            "" if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
            outcome,
        )


def allowed_bytes(limit: MemoryLimit | None, margin: float) -> int | None:
    """Returns what a trial may take: what is free of a limit, less a margin."""
    return None if limit is None else int(limit.free_bytes * (1 - margin))
