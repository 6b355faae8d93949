"""What `check_parity` found, as records that go to JSON and print as tables."""

import dataclasses
import math
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
        processes: Cold start and memory, the exported model first.
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
        if not needed or None in needed:
            return None
        return max(number for number in needed if number is not None)

    def table(self) -> str:
        """Returns verdict, differences, latencies and costs, at most 110 columns."""
        title = f"Exported to {self.runtime}: {self.verdict}"
        parts = [console.table(_COLUMNS, self._rows(), title=title), self.reason]
        return console.text_of(*parts, *self.notes)

    def _rows(self) -> list[tuple[str, str]]:
        rows = []
        for each in self.outputs:
            rows.append((f"difference of {each.name}", _difference_text(each)))
        for change in self.metrics:
            rows.append((f"{change.name} of {change.output}", _metric_text(change)))
        for latency in self.latencies:
            seconds = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
            texts = " / ".join(map(units.format_seconds, seconds))
            rows.append((f"batch {latency.batch_size}, p50 / p90 / p99", texts))
        for speed in self.speedups:
            what = f"batch {speed.batch_size}, times {speed.against}"
            found = (speed.p50, speed.p90, speed.p99)
            rows.append((what, " / ".join(map(interval_text, found))))
        if self.size_bytes is not None:
            rows.append(("size", _size_text(self.size_bytes, self.reference_bytes)))
        for process in self.processes:
            seconds_text = units.format_seconds(process.cold_start_seconds)
            peak = units.format_bytes(process.peak_bytes)
            text = f"first answer after {seconds_text}, peak {peak}"
            rows.append((f"fresh process, {process.name}", text))
        return rows


_COLUMNS = {"what": console.FOLD, "found": {**console.FOLD, "ratio": 1}}


def is_faster(speedups: tuple[Speedup, ...]) -> bool:
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


def speed_text(speedups: tuple[Speedup, ...]) -> str:
    """Returns a sentence on what a model was timed against, at each batch size.

    Example:
        >>> once = Interval(3.1, 3.0, 3.2), Interval(1.4, 1.3, 1.5)
        >>> speed_text((Speedup("SavedModel", 1, *once[:1] * 3),
        ...             Speedup("XLA", 1, *once[1:] * 3)))
        'Its speed at batch 1 is 3.1 times SavedModel and 1.4 times XLA.'
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


def interval_text(found: Interval) -> str:
    """Returns a ratio with its interval.

    Example:
        >>> interval_text(Interval(2.0, 1.9, 2.2))
        '2.00 [1.90, 2.20]'
    """
    if not math.isfinite(found.high):
        return f"{found.estimate:.2f}"
    return f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _difference_text(found: OutputDifference) -> str:
    text = f"at most {found.largest:.3g}, mean {found.mean:.3g}, "
    text += f"{found.relative:.2g} of the spread"
    if found.num_answers:
        text += f"; {found.flipped} of {found.num_answers} predictions flipped"
    return text


def _metric_text(found: MetricChange) -> str:
    text = f"worse by {found.worsening:.3%}, at most {found.bound:.3%} "
    text += f"(allowed: {found.tolerance:.3%}) on {found.num_examples} examples"
    if math.isfinite(found.reference):
        text = f"{found.reference:.5g} -> {found.exported:.5g}; {text}"
    return text


def _size_text(size: int, reference: int | None) -> str:
    text = units.format_bytes(size)
    return f"{text}, {size / reference:.2f} of float32" if reference else text
