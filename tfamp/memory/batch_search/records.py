"""What a search for the batch size found: each trial, the choice, and what to do."""

import dataclasses
import os
from typing import Literal

from tfamp.machine.limits import MemoryLimit
from tfamp.memory.batch_search import text as rendering
from tfamp.memory.batch_search.settings import allowed_bytes
from tfamp.records.record import Record

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


@dataclasses.dataclass(frozen=True)
class Trial(Record):
    """Training steps of one batch size in processes of their own.

    Args:
        batch_size: Examples of a step, on all replicas.
        outcome: "fits", or how it ended.
        examples_per_second: By the median step; None where it did not fit.
        step_seconds: Median of the timed steps, of all processes.
        first_step_seconds: The first one, in which TensorFlow traces and compiles.
        peak_bytes: The most memory that was held: by the process, on a GPU by
            TensorFlow's allocator there. Where the trial was ended for it, the memory
            held then; None where it is not known.
        num_runs: Processes that tried it; a doubtful speed is measured twice.
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
    num_runs: int = 1
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
            "data" (it has no more examples).
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
        return [t for t in self.trials if t.fits and t.batch_size == self.batch_size][
            -1
        ]

    @property
    def allowed_bytes(self) -> int | None:
        """The limit without the margin; None where there is no limit."""
        return allowed_bytes(self.limit, self.margin)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change in the training script, one sentence or two each."""
        return rendering.advice(self)

    def table(self) -> str:
        """Returns the trials as a table of at most 110 columns."""
        return rendering.table(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws speed and memory against the batch size, with limit and choice.

        Args:
            path: An image file; its ending says its kind.

        Raises:
            ImportError: matplotlib is not installed.
        """
        rendering.plot(self, path)

    def __str__(self) -> str:
        return rendering.render(self)
