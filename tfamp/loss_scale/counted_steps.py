"""Steps of a `LossScaleOptimizer`, told one by one after they happened.

The optimizer keeps totals and a ring of its last steps. Read now and then, the two
give what each step since the last reading added to the totals.
"""

import collections
from typing import NamedTuple

import numpy as np

from tfamp.loss_scale.optimizer import LossScaleOptimizer
from tfamp.loss_scale.rule import ScaleState

# A rate in thousandths wants as many steps to be taken over.
RATE_STEPS = 1000
_RATE_DIGITS = 3


class Step(NamedTuple):
    """One step, and the totals just after it.

    Attributes:
        step: Its number, from 1; under accumulation each microbatch is a step.
        loss_scale: The scale it was computed with.
        applied_steps: Updates so far.
        skipped_steps: Skipped steps so far.
        consecutive_skips: Skipped steps in a row up to this one.
        gradient_norm: Norm of the unscaled gradients, None where it is not finite.
        overflow_rate: Skipped steps per 1,000, over the last `RATE_STEPS`.
    """

    step: int
    loss_scale: float
    applied_steps: int
    skipped_steps: int
    consecutive_skips: int
    gradient_norm: float | None
    overflow_rate: float


class Reading(NamedTuple):
    """What one reading brought.

    Attributes:
        steps: The steps since the last one, oldest first.
        num_lost: How many more there were, older than what the optimizer holds.
        logs: The present values, all finite, for the logs of `fit`.
        last_skip: Number of the last step that was skipped, None if none was.
        num_skips: Steps skipped since the last reading.
        nonfinite: Paths of the variables whose gradients were not finite in them.
    """

    steps: list[Step]
    num_lost: int
    logs: dict[str, float | int]
    last_skip: int | None
    num_skips: int
    nonfinite: tuple[str, ...]


class StepReader:
    """Reads the counters of an optimizer; steps that it took before are not told."""

    def __init__(self, optimizer: LossScaleOptimizer) -> None:
        self.optimizer = optimizer
        self._seen: ScaleState
        self._counts: dict[str, int]
        self._recent: collections.deque[bool]
        self._begin()

    def read(self) -> Reading:
        """Returns what happened since the last reading; waits for the device."""
        # Not `optimizer.scale`: whoever asks for that is taken to scale by hand.
        now = self.optimizer.scale_variables.numbers()
        if now.judged < self._seen.judged:
            self._begin()  # older weights were loaded
            now = self._seen
        history = self.optimizer.history()
        is_new = history["step"] > self._seen.judged
        history = {name: values[is_new] for name, values in history.items()}
        num_new = now.judged - self._seen.judged
        num_lost = num_new - len(history["step"])
        steps = self._steps(history, now, num_lost)
        skips = history["step"][history["skipped"]]
        nonfinite: tuple[str, ...] = ()
        if len(skips):
            before, self._counts = self._counts, self.optimizer.nonfinite_counts
            grown = (k for k, v in self._counts.items() if v > before.get(k, 0))
            nonfinite = tuple(grown)
        reading = Reading(
            steps=steps,
            num_lost=num_lost,
            logs=self._logs(now),
            last_skip=int(skips[-1]) if len(skips) else None,
            num_skips=now.skipped - self._seen.skipped,
            nonfinite=nonfinite,
        )
        self._seen = now
        return reading

    def _begin(self) -> None:
        self._seen = self.optimizer.scale_variables.numbers()
        self._counts = self.optimizer.nonfinite_counts
        skipped = self.optimizer.history()["skipped"].tolist()
        self._recent = collections.deque(skipped, maxlen=RATE_STEPS)

    def _logs(self, now: ScaleState) -> dict[str, float | int]:
        return {
            "loss_scale": now.scale,
            "applied_steps": now.applied,
            "skipped_steps": now.skipped,
            "consecutive_skips": now.streak,
            "gradient_norm": now.finite_norm,
            "overflow_rate": self._rate(),
        }

    def _rate(self) -> float:
        num_steps = max(len(self._recent), 1)
        return round(1000 * sum(self._recent) / num_steps, _RATE_DIGITS)

    def _steps(
        self, history: dict[str, np.ndarray], now: ScaleState, num_lost: int
    ) -> list[Step]:
        """Returns the steps of `history`, with totals that end in those of `now`."""
        seen, limit = self._seen, self.optimizer.max_consecutive_skips
        skips = history["skipped"].tolist()
        updates = self._updates(skips)
        applied, skipped, streak = seen.applied, seen.skipped, seen.streak
        if num_lost:  # then count back from the end
            applied = now.applied - sum(updates)
            skipped, streak = now.skipped - sum(skips), 0
            self._recent.extend([False] * num_lost)
        steps = []
        for position, is_skip in enumerate(skips):
            applied += updates[position]
            skipped += is_skip
            if limit is not None and streak >= limit:
                streak = 0  # training was stopped there, and begun again
            streak = streak + 1 if is_skip else 0
            self._recent.append(is_skip)
            norm = float(history["gradient_norm"][position])
            steps.append(
                Step(
                    step=int(history["step"][position]),
                    loss_scale=_shortened(history["scale"][position]),
                    applied_steps=applied,
                    skipped_steps=skipped,
                    consecutive_skips=streak,
                    gradient_norm=_shortened(norm) if np.isfinite(norm) else None,
                    overflow_rate=self._rate(),
                )
            )
        if steps:  # the end of an epoch applies a window that is not full
            steps[-1] = steps[-1]._replace(applied_steps=now.applied)
        return steps

    def _updates(self, skips: list[bool]) -> list[bool]:
        """Returns for each step whether it completed an update."""
        in_window, found = self._seen.microbatches, []
        for is_skip in skips:
            in_window += not is_skip
            found.append(in_window >= self.optimizer.accumulation_steps)
            if found[-1]:
                in_window = 0
        return found


def _shortened(value: float) -> float:
    """Returns a float32 with the nine digits that tell it apart from the others."""
    return float(f"{value:.9g}")
