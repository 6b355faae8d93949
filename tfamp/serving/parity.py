"""What the gate found, as records that go to JSON and print as tables."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from tfamp.records import console, units
from tfamp.records.record import Record, TableRecord
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import Interval, effect_of_ratio

Verdict = Literal["as good and faster", "as good, not faster", "worse", "undecided"]


@dataclasses.dataclass(frozen=True)
class OutputDifference(Record):
    """How far one output is from the reference's, over all validation examples.

    Args:
        name: The output.
        largest: The largest difference of two numbers; inf where one is not finite
            that is so in float32.
        mean: The mean of the magnitudes of the differences.
        relative: Root mean square of the differences over the spread of the
            reference's numbers over the examples.
        num_answers: Predicted classes that were compared; 0 where it has none.
        flipped: Those that are others than the reference's.
    """

    name: str
    largest: float
    mean: float
    relative: float
    num_answers: int = 0
    flipped: int = 0


@dataclasses.dataclass(frozen=True)
class MetricChange(Record):
    """A metric under both models, example by example.

    Args:
        name: The metric.
        output: The output it is of.
        reference: Its mean in float32; NaN where there are no labels.
        exported: Its mean of the exported model.
        worsening: By how much it is worse: in its own points for a rate such as an
            accuracy, as a part of float32's mean for a loss.
        low: The true worsening is above, but for a chance of 5 %.
        bound: The true worsening is below, but for a chance of 5 %.
        tolerance: What `bound` may be.
        num_examples: Examples, each answered by both.
        num_needed: Examples that would settle it, if those that are added are answered
            as these; None where it is settled or more cannot show it to hold.
    """

    name: str
    output: str
    reference: float
    exported: float
    worsening: float
    low: float
    bound: float
    tolerance: float
    num_examples: int
    num_needed: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the worsening is shown to be within the tolerance."""
        return self.bound <= self.tolerance

    @property
    def fails(self) -> bool:
        """Whether it is shown to be beyond the tolerance."""
        return not self.low <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Speedup(Record):
    """Seconds of a call of another model over those of the exported one, in turns.

    Args:
        against: The other model.
        batch_size: Examples in a call.
        p50: The ratio of medians within a turn, and its interval over the turns.
        p90: That of the calls that nine of ten are faster than.
        p99: That of ninety-nine of a hundred; of the longest where there were fewer.
    """

    against: str
    batch_size: int
    p50: Interval
    p90: Interval
    p99: Interval


@dataclasses.dataclass(frozen=True)
class FreshProcess(Record):
    """What a model costs a process that does nothing else.

    Args:
        name: The model.
        cold_start_seconds: From the start of the process to the first answer, one
            example.
        peak_bytes: The most that it held (resident set size).
    """

    name: str
    cold_start_seconds: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Parity(TableRecord):
    """An exported model against the float32 one it came from.

    Args:
        verdict: "as good and faster" or "as good, not faster" where the metric's drop
            is shown to be within the tolerance; "worse" where it is shown to be beyond
            it; "undecided" where the examples leave both open.
        reason: Why, in a sentence or two.
        runtime: What ran it.
        num_examples: Validation examples.
        outputs: How far the outputs are apart.
        metrics: One for each output that has one.
        latencies: Of the exported model at batch 1 and at the user's batch.
        speedups: Against each other model at these sizes.
        processes: Cold start and memory of the exported model.
        size_bytes: Of its files; None where it has none.
        reference_bytes: Of the float32 weights; None where they are not known.
        notes: What was not measured, and why.
    """

    verdict: Verdict
    reason: str
    runtime: str
    num_examples: int
    outputs: tuple[OutputDifference, ...]
    metrics: tuple[MetricChange, ...] = ()
    latencies: tuple[Latency, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    processes: tuple[FreshProcess, ...] = ()
    size_bytes: int | None = None
    reference_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_as_good(self) -> bool:
        """Whether it is shown to be as good as float32."""
        return self.verdict.startswith("as good")

    @property
    def flipped(self) -> int:
        """Predicted classes that are others than float32's."""
        return sum(each.flipped for each in self.outputs)

    @property
    def num_needed(self) -> int | None:
        """Examples that would settle an "undecided"; None where none would."""
        needed = [each.num_needed for each in self.metrics if not each.holds]
        known = [number for number in needed if number is not None]
        return max(known) if known and len(known) == len(needed) else None

    def timed(
        self, latencies: Sequence[Latency], speedups: Sequence[Speedup]
    ) -> "Parity":
        """Returns it with how fast the model is, which the verdict then tells.

        It is faster where it is so against all others at some batch size, and slower
        than none at the other.
        """
        told = f"{self.reason} {speed_text(speedups)}".rstrip()
        verdict = self.verdict
        if self.is_as_good and is_faster(speedups):
            verdict = "as good and faster"
        return dataclasses.replace(
            self,
            verdict=verdict,
            reason=told,
            latencies=tuple(latencies),
            speedups=tuple(speedups),
        )

    def table(self) -> str:
        """Returns verdict, differences, latencies and costs, at most 110 columns."""
        title = f"Exported to {self.runtime}: {self.verdict}"
        columns = {"what": console.FOLD, "found": {**console.FOLD, "ratio": 1}}
        parts = [console.table(columns, self._rows(), title=title), self.reason]
        return console.text_of(*parts, *self.notes)

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        for each in self.outputs:
            text = f"at most {each.largest:.3g}, mean {each.mean:.3g}, "
            text += f"{each.relative:.2g} of the spread"
            if each.num_answers:
                text += f"; {each.flipped} of {each.num_answers} predictions flipped"
            rows.append((f"difference of {each.name}", text))
        for change in self.metrics:
            text = f"worse by {change.worsening:.3%}, at most {change.bound:.3%} "
            text += f"(allowed: {change.tolerance:.3%}) on {change.num_examples} "
            if math.isfinite(change.reference):
                text = f"{change.reference:.5g} -> {change.exported:.5g}; {text}"
            rows.append((f"{change.name} of {change.output}", f"{text}examples"))
        for latency in self.latencies:
            seconds = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
            texts = " / ".join(map(units.format_seconds, seconds))
            rows.append((f"batch {latency.batch_size}, p50 / p90 / p99", texts))
        for speed in self.speedups:
            what = f"batch {speed.batch_size}, times {speed.against}"
            found = (speed.p50, speed.p90, speed.p99)
            rows.append((what, " / ".join(map(_interval_text, found))))
        if self.size_bytes is not None:
            size = units.format_bytes(self.size_bytes)
            if self.reference_bytes:
                size += f", {self.size_bytes / self.reference_bytes:.2f} of float32"
            rows.append(("size", size))
        for process in self.processes:
            taken = units.format_seconds(process.cold_start_seconds)
            peak = units.format_bytes(process.peak_bytes)
            text = f"first answer after {taken}, peak {peak}"
            rows.append((f"fresh process, {process.name}", text))
        return rows


def is_faster(speedups: Sequence[Speedup]) -> bool:
    """Whether a model is faster than all others at some size, and slower at none.

    Example:
        >>> def at(size, low, middle, high):
        ...     return Speedup("x", size, *[Interval(middle, low, high)] * 3)
        >>> is_faster((at(1, 1.8, 2.0, 2.2), at(64, 0.9, 1.0, 1.1)))
        True
        >>> is_faster((at(1, 1.8, 2.0, 2.2), at(64, 0.7, 0.8, 0.9)))
        False
    """
    by_size: dict[int, list[str]] = {}
    for each in speedups:
        effect = effect_of_ratio(each.p50, more_is_better=True)
        by_size.setdefault(each.batch_size, []).append(effect)
    effects = [effect for found in by_size.values() for effect in found]
    return "worse" not in effects and any(
        set(found) == {"better"} for found in by_size.values()
    )


def speed_text(speedups: Sequence[Speedup]) -> str:
    """Returns a sentence on what a model was timed against, at each batch size.

    Example:
        >>> once = Interval(3.1, 3.0, 3.2), Interval(1.4, 1.3, 1.5)
        >>> speed_text((Speedup("SavedModel", 1, *once[:1] * 3),
        ...             Speedup("the best float32 (onnx)", 1, *once[1:] * 3)))
        'Its speed at batch 1 is 3.1 times SavedModel and 1.4 times the best float32 \
(onnx).'
    """
    told = []
    for size in sorted({each.batch_size for each in speedups}):
        times = [
            f"{each.p50.estimate:.2g} times {each.against}"
            for each in speedups
            if each.batch_size == size
        ]
        told.append(f"at batch {size} is {' and '.join(times)}")
    return f"Its speed {', '.join(told)}." if told else ""


def _interval_text(found: Interval) -> str:
    if not math.isfinite(found.high):
        return f"{found.estimate:.2f}"
    return f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"
