"""The record of a measurement: verdict, gain, times and what to change."""

import dataclasses

import numpy as np

from tfamp.records import console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_seconds, format_share
from tfamp.stepping.input_waits.verdict import Cause

_ROWS = {
    "real": "real pipeline, with the model",
    "compute": "model alone, batches from memory",
    "input": "pipeline alone",
    "prefetched": "real pipeline and `.prefetch(2)`",
}


@dataclasses.dataclass(frozen=True)
class Bottleneck(TableRecord):
    """What holds training up: the input, the model, or both at the same cores.

    Args:
        verdict: "input", "compute", "contention" or "unclear".
        possible_gain: Part of a step that a perfect input would save, in [0, 1).
        gain_low: Lower end of its noise band (95 %).
        gain_high: Upper end of its noise band.
        reason: Why, in one sentence.
        advice: What to change, numbered lines, most promising first.
        times: Seconds a step, one figure a round: "real", "compute", "input", and
            "prefetched" where that was tried.
        batch_size: Examples in a batch.
        epoch_start_seconds: What the start of an epoch takes beyond its steps; None
            where epochs are too short or their length is unknown: the starts are in
            the times then.
        epoch_steps: Steps of an epoch, None if unknown.
    """

    verdict: Cause
    possible_gain: float
    gain_low: float
    gain_high: float
    reason: str
    advice: str
    times: dict[str, tuple[float, ...]] = dataclasses.field(hash=False)
    batch_size: int
    epoch_start_seconds: float | None = None
    epoch_steps: int | None = None

    @property
    def real_seconds(self) -> float:
        """Seconds of a step with the real pipeline, the median of the rounds."""
        return float(np.median(self.times["real"]))

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step with batches from memory."""
        return float(np.median(self.times["compute"]))

    @property
    def input_seconds(self) -> float:
        """Seconds that the pipeline alone takes for the batch of a step."""
        return float(np.median(self.times["input"]))

    def table(self) -> str:
        """Returns times, verdict and advice as text of at most 110 columns."""
        rounds = len(self.times["real"])
        rows = []
        for name, seconds in self.times.items():
            middle = float(np.median(seconds))
            low, high = np.percentile(seconds, (25, 75))
            between = f"{format_seconds(low)} to {format_seconds(high)}"
            rate = f"{self.batch_size / middle:,.0f}"
            shown = _ROWS.get(name, name)
            rows.append((shown, format_seconds(middle), between, rate))
        right = ("median", "middle half", "examples/s")
        table = console.table(
            {"a step of": {}, **dict.fromkeys(right, console.RIGHT)},
            rows,
            title=f"{rounds} rounds, batches of {self.batch_size}",
        )
        lines = [*self._sentences(), *self.advice.splitlines()]
        return "\n".join([console.text_of(table), *lines])

    def _sentences(self) -> list[str]:
        sentences = [
            f"Verdict: {self.verdict}; {self.reason}.",
            f"Possible gain: {format_share(self.possible_gain)} of a step "
            f"({format_share(self.gain_low)} to {format_share(self.gain_high)}).",
        ]
        if self.epoch_start_seconds is not None and self.epoch_steps is not None:
            whole = self.epoch_start_seconds + self.epoch_steps * self.real_seconds
            sentences.append(
                f"An epoch starts within {format_seconds(self.epoch_start_seconds)}, "
                f"{format_share(self.epoch_start_seconds / whole)} of its "
                f"{self.epoch_steps:,} steps; not counted above."
            )
        return sentences
