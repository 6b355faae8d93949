"""Says what holds a training step up, from times alone.

With the real pipeline a step takes `real` seconds, with batches from memory
`compute`, and the pipeline alone gives a batch in `input`. A perfect pipeline would
bring `real` down to `compute`. What is lost to a pipeline that is slow by itself is
`input - compute`; what is lost although neither alone takes that long is
`real - max(input, compute)`: both want the same cores, or wait for one another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from tfamp.records import console
from tfamp.records.record import TableRecord
from tfamp.records.units import format_seconds, format_share

Cause = Literal["input", "compute", "contention", "unclear"]
# Less than this part of the step is not worth a changed pipeline.
MIN_GAIN = 0.1
# Bounds of the noise band: 95 % of the resampled medians lie inside.
_BAND = (2.5, 97.5)
_NUM_RESAMPLES = 2000
# Prefetching that regains this part of what is lost shows that nothing competed.
_REGAINED = 0.5
_ROWS = {
    "real": "real pipeline, with the model",
    "compute": "model alone, batches from memory",
    "input": "pipeline alone",
    "prefetched": "real pipeline and `.prefetch(2)`",
}


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A verdict and the figures that it rests on.

    Attributes:
        gain: 1 - compute / real, the median over rounds, at least 0.
        gain_high: Upper end of its noise band.
        needs_prefetch: Whether fetching ahead regained at least half of that.
    """

    verdict: Cause
    gain: float
    gain_low: float
    gain_high: float
    lost_to_input: float
    lost_to_sharing: float
    needs_prefetch: bool
    reason: str


def judge(
    real: Sequence[float],
    compute: Sequence[float],
    input: Sequence[float],
    *,
    prefetched_gains: Sequence[float] = (),
) -> Judgement:
    """Returns what holds the step up, from the seconds of a step in each round.

    Figures are medians over rounds of what each round says by itself: times of one
    round were taken within the same second, so what slows a machine down for a while
    slows all three and cancels. (On two cores shared with other work, medians of each
    kind apart left a band of 2.2, pairs one of 0.16.) The noise band comes from
    resampling the rounds.

    Args:
        real: With the real pipeline.
        compute: With batches from memory.
        input: The pipeline alone.
        prefetched_gains: 1 - compute / real of rounds with a prefetch behind the
            pipeline; empty if that was not tried.

    Source: the bootstrap's percentile interval, Efron and Tibshirani, An Introduction
    to the Bootstrap, 1993, chapter 13.
    """
    if not len(real) == len(compute) == len(input) or not len(real):
        raise ValueError(
            f"`real`, `compute` and `input` have {len(real)}, {len(compute)} and "
            f"{len(input)} rounds; expected one number of at least 1. Pass the times "
            "of the same rounds."
        )
    times = np.array([real, compute, input], np.float64)
    rounds = np.array(_losses(times))
    gain, to_input, to_sharing = np.median(rounds, axis=1)
    rng = np.random.default_rng(0)
    gains, inputs, sharings = _resampled(rounds, rng)
    low, high = np.percentile(gains, _BAND)
    more_low, more_high = np.percentile(sharings - inputs, _BAND)
    needs_prefetch = False
    if len(prefetched_gains) and to_sharing > 0:
        (after,) = _resampled(np.array([prefetched_gains], np.float64), rng)
        regained = gain - float(np.median(prefetched_gains))
        sure = np.percentile(gains - after, _BAND[0]) > 0
        needs_prefetch = bool(sure and regained >= _REGAINED * to_sharing)
    verdict: Cause = "unclear"
    if high < MIN_GAIN:
        verdict = "compute"
        reason = f"at most {_percent(high)} of a step goes to the input"
    elif low <= MIN_GAIN:
        reason = (
            f"the noise allows a gain from {_percent(low)} to {_percent(high)}, and "
            f"{_percent(MIN_GAIN)} is where the input begins to matter"
        )
    elif needs_prefetch:
        verdict = "input"
        reason = "the step waits for each batch; with a prefetch behind it much less"
    elif more_low > 0:
        verdict = "contention"
        reason = (
            f"{_percent(to_sharing)} of a step is explained by neither alone: input "
            "and model compete for the same cores"
        )
    elif more_high < 0:
        verdict = "input"
        ratio = np.median(times[2] / times[1])
        reason = f"alone, the input takes {ratio:.1f} times as long as the model"
    else:
        reason = (
            f"{_percent(to_input)} of a step is lost to a slow input and "
            f"{_percent(to_sharing)} to competition; the noise does not tell which is "
            "more"
        )
    return Judgement(
        verdict=verdict,
        gain=max(0.0, float(gain)),
        gain_low=max(0.0, float(low)),
        gain_high=max(0.0, float(high)),
        lost_to_input=float(to_input),
        lost_to_sharing=float(to_sharing),
        needs_prefetch=needs_prefetch,
        reason=reason,
    )


def _losses(times: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the gain, and the parts of a step lost to input and to sharing."""
    real, compute, alone = times
    gain = 1 - compute / real
    to_input = np.maximum(alone - compute, 0) / real
    to_sharing = np.maximum(real - np.maximum(alone, compute), 0) / real
    return gain, to_input, to_sharing


def _resampled(rounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns medians of each row over resampled rounds, shape (rows, resamples)."""
    number = rounds.shape[1]
    chosen = rng.integers(number, size=(_NUM_RESAMPLES, number))
    return np.median(rounds[:, chosen], axis=2)


def _percent(share: float) -> str:
    return f"{100 * max(0.0, float(share)):.0f} %"


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
