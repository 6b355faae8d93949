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
class MetricChange(Record):
    """A metric of an output under both models, example by example."""

    name: str
    output: str
    reference: float  # its mean in float32; NaN where there are no labels
    exported: float
    worsening: float  # in points of a rate, as a part of float32's mean for a loss
    low: float  # the true worsening is above, but for a chance of 5 %
    bound: float  # the true worsening is below, but for a chance of 5 %
    tolerance: float
    num_examples: int
    num_needed: int | None = None  # examples, alike, that would show it to hold
    difference: float = 0.0  # root mean square of the outputs' over their spread
    flipped: int = 0  # predicted classes that are others than float32's

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
    """How many times as fast as another model the exported one is, in turns."""

    against: str
    batch_size: int
    ratio: Interval  # of the median seconds of a call, over the turns


@dataclasses.dataclass(frozen=True)
class FreshProcess(Record):
    """What a model costs a process that does nothing else, until its first answer."""

    name: str
    cold_start_seconds: float
    peak_bytes: int  # resident set size


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
        metrics: One for each output.
        latencies: Of the exported model at batch 1 and at the user's batch.
        speedups: Against each other model at these sizes.
        processes: Cold start and memory of the exported model.
        notes: What was not measured, and why.
    """

    verdict: Verdict
    reason: str
    runtime: str
    num_examples: int
    metrics: tuple[MetricChange, ...] = ()
    latencies: tuple[Latency, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    processes: tuple[FreshProcess, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_needed(self) -> int | None:
        """Examples that would settle an "undecided"; None where none would."""
        needed = [each.num_needed for each in self.metrics if not each.holds]
        return None if None in needed else max(filter(None, needed), default=None)

    def timed(
        self, latencies: Sequence[Latency], speedups: Sequence[Speedup]
    ) -> "Parity":
        """Returns it with how fast the model is, which the verdict then tells.

        It is faster where it is so against all others at some batch size, and slower
        than none at the other.
        """
        sizes = sorted({each.batch_size for each in speedups})
        effects, told = [], []
        for size in sizes:
            here = [each for each in speedups if each.batch_size == size]
            effects.append(
                {effect_of_ratio(each.ratio, more_is_better=True) for each in here}
            )
            times = (f"{x.ratio.estimate:.2g} times {x.against}" for x in here)
            told.append(f"at batch {size} is {' and '.join(times)}")
        is_slower = any("worse" in each for each in effects)
        is_faster = not is_slower and {"better"} in effects
        verdict = self.verdict
        if verdict.startswith("as good") and is_faster:
            verdict = "as good and faster"
        reason = f"{self.reason} Its speed {', '.join(told)}." if told else self.reason
        return dataclasses.replace(
            self,
            verdict=verdict,
            reason=reason,
            latencies=tuple(latencies),
            speedups=tuple(speedups),
        )

    def table(self) -> str:
        """Returns verdict, differences, latencies and costs, at most 110 columns."""
        title = f"Exported to {self.runtime}: {self.verdict}"
        columns = {"what": console.FOLD, "found": {**console.FOLD, "ratio": 1}}
        rows = []
        for each in self.metrics:
            text = f"worse by {each.worsening:.3%}, at most {each.bound:.3%} "
            text += f"(allowed: {each.tolerance:.3%}) on {each.num_examples} examples; "
            if math.isfinite(each.reference):
                text = f"{each.reference:.5g} -> {each.exported:.5g}; {text}"
            text += f"{each.flipped} predictions flipped, outputs off by "
            text += f"{each.difference:.2g} of their spread"
            rows.append((f"{each.name} of {each.output}", text))
        for latency in self.latencies:
            seconds = (latency.p50_seconds, latency.p90_seconds, latency.p99_seconds)
            texts = " / ".join(map(units.format_seconds, seconds))
            rows.append((f"batch {latency.batch_size}, p50 / p90 / p99", texts))
        for speed in self.speedups:
            text = f"{speed.ratio.estimate:.2f}"
            text += f" [{speed.ratio.low:.2f}, {speed.ratio.high:.2f}]"
            rows.append((f"batch {speed.batch_size}, times {speed.against}", text))
        for process in self.processes:
            taken = units.format_seconds(process.cold_start_seconds)
            text = f"first answer after {taken}, peak "
            rows.append(
                (
                    f"fresh process, {process.name}",
                    text + units.format_bytes(process.peak_bytes),
                )
            )
        parts = [console.table(columns, rows, title=title), self.reason]
        return console.text_of(*parts, *self.notes)
